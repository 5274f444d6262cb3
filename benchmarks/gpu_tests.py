"""Run every test that needs a GPU, in several processes, and write a record: ``python -m benchmarks.gpu_tests``."""

import collections
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks import machine

ROOT = Path(__file__).parent.parent


def main() -> int:
    machine.need_gpu()
    workers = min(16, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--gpu",
            "-q",
            "-n",
            str(workers),
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
        ]
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the workers share the GPU
        start = time.perf_counter()
        status = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=env, check=False).returncode
        seconds = time.perf_counter() - start
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    outcome = lambda case: next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
    by_file = collections.defaultdict(collections.Counter)
    for case in cases:
        by_file[case.get("classname")][outcome(case)] += 1
    about = machine.describe()
    record = {
        **about,
        "seconds": round(seconds, 1),
        "total": dict(sum(by_file.values(), collections.Counter())),
        "files": {name: dict(count) for name, count in sorted(by_file.items())},
        "not_passed": [f"{c.get('classname')}::{c.get('name')}" for c in cases if outcome(c) != "passed"],
    }
    path = machine.record_path("tests", about)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{record['total']} in {seconds:.0f} s on {about['devices']} x {about['device']}; record {path.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
