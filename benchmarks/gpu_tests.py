"""Run every test that needs a GPU, in several processes, and write a record: ``python -m benchmarks.gpu_tests [--times 2]``."""

import argparse
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
SLOWEST = 15  # tests that are named in what is printed


def outcome(case: ET.Element) -> str:
    """How a test ended."""
    return next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")


def once() -> tuple[int, dict, list[ET.Element]]:
    """Run the tier: pytest's status, what the record says of it, and the tests."""
    workers = min(16, os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
        command = [sys.executable, "-m", "pytest", "--gpu", "-q", "-n", str(workers), *plugins, f"--junitxml={report}"]
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the workers share the GPU
        start = time.perf_counter()
        status = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
        seconds = time.perf_counter() - start
        cases = list(ET.parse(report).getroot().iter("testcase")) if report.exists() else []
    by_file = collections.defaultdict(collections.Counter)
    for case in cases:
        by_file[case.get("classname")][outcome(case)] += 1
    found = {
        "seconds": round(seconds, 1),
        "total": dict(sum(by_file.values(), collections.Counter())),
        "files": {name: dict(count) for name, count in sorted(by_file.items())},
        "not_passed": [f"{c.get('classname')}::{c.get('name')}" for c in cases if outcome(c) != "passed"],
    }
    return status, found, cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1, help="how many times in a row")
    times = parser.parse_args().times
    machine.need_gpu()
    about = machine.describe()
    path = machine.record_path("tests", about)
    runs, statuses = [], []
    for _ in range(times):
        status, found, cases = once()
        statuses.append(status)
        runs.append(found)
        path.write_text(json.dumps(about | (runs[0] if times == 1 else {"runs": runs}), indent=2) + "\n")
        for case in sorted(cases, key=lambda c: -float(c.get("time", 0)))[:SLOWEST]:
            print(f"{float(case.get('time', 0)):8.1f} s  {case.get('classname')}::{case.get('name')}")
        print(f"{found['total']} in {found['seconds']:.0f} s on {about['devices']} x {about['device']}", flush=True)
    print(f"record {path.relative_to(ROOT)}")
    return max(statuses)


if __name__ == "__main__":
    raise SystemExit(main())
