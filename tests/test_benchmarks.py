"""Benchmarks on a machine without a GPU say so in one line (case 107)."""

import os
import subprocess
import sys

import pytest

from benchmarks import before_after

COMMANDS = [
    ["pytest", "--benchmark", "-p", "no:cacheprovider"],
    ["pytest", "--gpu", "-p", "no:cacheprovider"],
    *(["benchmarks." + name] for name in ("training", "counters", "launch_cost", "sweep", "gpu_tests")),
    ["benchmarks.before_after", "elsewhere"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_gpu_is_said(command, tmp_path):
    env = os.environ | {"PATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-m", *command], env=env, capture_output=True, text=True, check=False)
    said = run.stdout + run.stderr
    assert run.returncode != 0
    assert "This needs an NVIDIA GPU" in said
    assert "Traceback" not in said


def test_slower_is_beyond_what_rounds_differ_by():
    samples = {"before": {"a": [100.0, 101.0, 99.0], "b": [100.0, 100.0, 100.0]},
               "after": {"a": [102.5, 102.5, 102.5], "b": [102.5, 102.5, 102.5]}}  # fmt: skip
    assert [row["slower"] for row in before_after.record(samples)] == [False, True]
