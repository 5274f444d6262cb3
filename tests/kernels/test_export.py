"""Case 60: programs for a GPU that is not there are exported, kept and loaded; every process lowers them to the same bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jtops
from tests.kernels import lowered
from tests.specs import SPECS, draw, function, some_ops, with_gradients

ROOT = Path(__file__).parents[2]


def program(spec, case):
    """Value and gradients of an op's small case."""
    return jax.jit(with_gradients(function(spec, case)))


SMALL = [(spec, case) for spec in SPECS.values() for case in spec.small]


@some_ops
@pytest.mark.spec("compile and export for a target without that GPU")
def test_export_for_a_gpu_that_is_not_there(spec, case):
    operands = draw(spec, case)
    with pytest.raises(jtops.UnsupportedError, match=r'needs to know the GPU.*jtops.config.target\("sm_90"\)'):
        jax.export.export(program(spec, case), platforms=("cuda",), disabled_checks=jtops.export_checks)(*operands)
    with jtops.config.target("sm_90"):
        exported = jax.export.export(program(spec, case), platforms=("cuda",), disabled_checks=jtops.export_checks)(*operands)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == ("cuda",)
    assert loaded.mlir_module() == exported.mlir_module()
    assert len(re.findall(lowered.CALL, loaded.mlir_module())) >= 2


@some_ops
def test_export_for_the_cpu(spec, case):
    operands = draw(spec, case)
    loaded = jax.export.deserialize(jax.export.export(program(spec, case))(*operands).serialize())
    for got, want in zip(jax.tree.leaves(loaded.call(*operands)), jax.tree.leaves(program(spec, case)(*operands)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_a_loaded_program_gives_the_same_numbers():
    for spec, case in SMALL:
        operands = draw(spec, case)
        exported = jax.export.export(program(spec, case), platforms=("cuda",), disabled_checks=jtops.export_checks)(*operands)
        loaded = jax.export.deserialize(exported.serialize())
        for got, want in zip(jax.tree.leaves(loaded.call(*operands)), jax.tree.leaves(program(spec, case)(*operands)), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"{spec.name} {case.id}")


def texts() -> str:
    """Every op's program, as text."""
    return "\n".join(lowered.text(program(spec, case), *draw(spec, case)) for spec, case in SMALL)


@pytest.mark.slow
@pytest.mark.spec("two launch paths, byte-stable lowered text")
def test_every_op_is_the_same_text_in_two_processes(tmp_path):
    """No address, time, path or hash seed is in a program, nor in the launch records it holds."""
    found = []
    for i in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": i, "TRITON_CACHE_DIR": str(tmp_path / i), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-W", "ignore", "-c", "from tests.kernels import test_export as t; print(t.texts())"]
        run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(run.stdout)
    assert found[0] == found[1]
    assert len(re.findall(lowered.CALL, found[0])) >= 2 * len(SMALL)
    assert str(tmp_path) not in found[0]
    assert str(ROOT) not in found[0]


CACHED = """
import sys
import jax, jax.numpy as jnp, jtops
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
implementation, devices, flag = sys.argv[1:]
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", flag == "flag")
mesh = jax.make_mesh((int(devices),), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = jax.device_put(jnp.arange(64.0).reshape(4, 16), jax.NamedSharding(mesh, jax.P("d")))
before = len(hits)
y = jax.jit(lambda x: jtops.softmax(jtops.layer_norm(x), implementation=implementation))(x)
found = hits[before:].count("/jax/compilation_cache/cache_hits")
print(y.sum(), found)
"""


def run_twice(folder, platform: str, *arguments: str) -> list[int]:
    """Whether JAX's cache in `folder` had the program, in two processes one after the other, which agree on its result."""
    env = os.environ | {"JAX_PLATFORMS": platform, "JAX_COMPILATION_CACHE_DIR": str(folder), "XLA_FLAGS": ""}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    said = []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", CACHED, *arguments]
        run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        said.append(run.stdout.split())
    assert said[0][0] == said[1][0]
    return [int(hits) for _, hits in said]


@pytest.mark.slow
def test_a_second_process_hits_jaxs_cache(tmp_path):
    """The interpreter's calls are in programs that JAX keeps on disk, and run when they come from there."""
    assert run_twice(tmp_path, "cpu", "interpret", "1", "no flag") == [0, 1]


@pytest.mark.multigpu
def test_a_second_process_hits_jaxs_cache_on_an_automatic_mesh(tmp_path):
    """custom_partitioning writes an address into the program: only JAX's flag takes it out of the cache's key."""
    assert run_twice(tmp_path, "cuda,cpu", "triton", "2", "flag") == [0, 1]
