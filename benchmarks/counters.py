"""What the hardware counts while row ops run: ``python -m benchmarks.counters``. Needs Nsight Compute (``ncu``) and leave to count.

It counts, for the cases below and kernel by kernel, the bytes read from and written to memory and moved by the L2 cache, how full
the multiprocessors are, and what warps wait for. It writes JSON under benchmarks/results.
"""

import csv
import functools
import io
import itertools
import json
import os
import subprocess
import sys

import jax

import jtops
from benchmarks import machine, sweep
from benchmarks.test_ops import with_gradients
from jtops.kernels.specs import SPECS

CASES = [  # op, rows, features, with gradients
    ("softmax", 8192, 4096, False),
    ("softmax", 8192, 16384, False),
    ("softmax", 8192, 50257, False),
    ("softmax", 4096, 65536, True),
    ("softmax", 4096, 131072, True),
    ("logsumexp", 8192, 4096, False),
    ("layer_norm", 8192, 1024, True),
    ("layer_norm", 8192, 5120, True),
    ("layer_norm", 8192, 12288, True),
    ("layer_norm", 8192, 32768, True),
    ("layer_norm", 4096, 131072, True),
]
STALLS = ("long_scoreboard", "barrier", "lg_throttle", "mio_throttle", "short_scoreboard", "wait", "math_pipe_throttle", "membar")
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "lts__t_bytes.sum": "l2_bytes",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue_percent",
    **{f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio": f"stall_{s}" for s in STALLS},
}
MARK = "case "


def run() -> None:
    """Launch every case once; what ncu counts is told apart by the order of cases and the kernels' names."""
    for op, r, n, backward in CASES:
        options = {"axis": -1} if op == "logsumexp" else {}
        f = functools.partial(SPECS[op].function, implementation="triton", **options)
        given = sweep.operands(op, r, n, "bfloat16", 0, backward)
        jax.block_until_ready(given)
        launches = [(e.name, e.kernel) for e in jtops.explain(with_gradients(f) if backward else f, *given)]
        print(MARK + json.dumps([op, r, n, launches]), flush=True)
        jax.block_until_ready(jax.jit(with_gradients(f) if backward else f)(*given))


def main() -> None:
    """Count in a child process under ncu, and put the numbers together."""
    machine.need_gpu()
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env["XLA_FLAGS"] = env.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    command = ["ncu", "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS), "--kernel-name", r"regex:^_\w+_kernel$"]
    child = subprocess.run(
        [*command, sys.executable, "-m", "benchmarks.counters", "run"], capture_output=True, text=True, env=env, check=False
    )
    if child.returncode:
        sys.exit(f"ncu: {child.stdout[-2000:]}\n{child.stderr[-2000:]}")
    told = [json.loads(line[len(MARK) :]) for line in child.stdout.splitlines() if line.startswith(MARK)]
    table = child.stdout[child.stdout.index('"ID"') :]
    counted: dict[int, dict] = {}
    for line in csv.DictReader(io.StringIO("\n".join(x for x in table.splitlines() if x.startswith('"')))):
        kernel = counted.setdefault(int(line["ID"]), {"kernel": line["Kernel Name"]})
        kernel[METRICS[line["Metric Name"]]] = float(line["Metric Value"].replace(",", "")) * _unit(line["Metric Unit"])
    left = iter(counted[i] for i in sorted(counted))
    rows = []
    for op, r, n, launches in told:
        of_kernel = {kernel: name for name, kernel in launches}
        for kernel in itertools.islice(left, len(launches)):
            rows.append(_row(op, r, n, of_kernel[kernel["kernel"]], kernel))
    if list(left) or len(rows) != sum(len(launches) for *_, launches in told):
        sys.exit(f"ncu saw {len(counted)} kernels, which are not those that jtops launches: {told}")
    about = machine.describe()
    path = machine.record_path("counters", about)
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print(f"record: {path.name}")


def _row(op: str, r: int, n: int, name: str, kernel: dict) -> dict:
    """The row that is recorded and printed of a launch."""
    arrays = [kernel[k] / (2 * r * n) for k in ("read", "written", "l2_bytes")]
    waits = sorted(((kernel[f"stall_{s}"], s) for s in STALLS), reverse=True)[:3]
    print(
        f"{name:32}{r:>6} x {n:<7}{kernel['ns'] / 1e3:8.1f} us  read {arrays[0]:4.2f}, written {arrays[1]:4.2f}, "
        f"by L2 {arrays[2]:4.2f} arrays; warps {kernel['warps_percent']:3.0f} %, issue {kernel['issue_percent']:3.0f} %; "
        + ", ".join(f"{s} {v:.1f}" for v, s in waits)
    )
    return {"op": op, "rows": r, "features": n, "launch": name, "array_bytes": 2 * r * n, **kernel}


def _unit(name: str) -> float:
    return {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6}.get(name, 1.0)


if __name__ == "__main__":
    run() if sys.argv[1:] == ["run"] else main()
