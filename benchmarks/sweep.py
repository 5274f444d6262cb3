"""Row ops over their width: ``python -m benchmarks.sweep``. Shares of a copy's speed for 64 to 262144 features, jtops and XLA.

It measures the forward, and what the gradients add to it. The ceiling is a copy of as many bytes in the same run. It ends with a
table of all that was measured, and writes JSON and a picture under benchmarks/results.
"""

import concurrent.futures
import functools
import json
import statistics

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from benchmarks import harness, machine
from benchmarks.test_ops import disagreement, with_gradients
from jtops.kernels.specs import SPECS

SWEPT = ("softmax", "layer_norm")
WIDTHS = sorted({2**i for i in range(6, 19)} | {768, 1000, 3072, 5120, 12288, 50257})
MORE = [  # op, rows, width, dtype
    *(("logsumexp", r, n, "bfloat16") for r, n in ((32768, 1024), (8192, 4096), (8192, 32768), (4096, 131072), (8192, 50257))),
    *(("log_softmax", r, n, "bfloat16") for r, n in ((8192, 4096), (8192, 32768))),
    *(("rms_norm", r, n, "bfloat16") for r, n in ((131072, 256), (8192, 4096), (8192, 5120), (8192, 16384), (4096, 131072))),
    *(("add_layer_norm", r, n, "bfloat16") for r, n in ((8192, 4096), (8192, 8192), (8192, 16384))),
    *((op, r, n, "float32") for op in SWEPT for r, n in ((131072, 256), (32768, 1024), (8192, 4096), (8192, 8192), (8192, 16384))),
    *((op, r, n, "bfloat16") for op in SWEPT for r, n in ((32, 4096), (8192, 1024), (262144, 256), (65536, 1001))),
]
ROUNDS = 5


def rows_of(n: int) -> int:
    """The number of rows: 2^25 elements and more; 8192 rows from 4096 features on, fewer of the longest."""
    return 2**25 // n if n <= 4096 else 8192 if n <= 50257 else 2**29 // n


CASES = [(op, rows_of(n), n, "bfloat16") for op in SWEPT for n in WIDTHS] + MORE


def operands(op: str, r: int, n: int, dtype: str, seed: int, cotangent: bool) -> tuple:
    """Random operands; the cotangent of the result last."""
    xs = [(r, n)] * (2 if op.startswith("add_") else 1)
    parameters = [(n,)] * (2 if op.endswith("layer_norm") else 1 if op.endswith("rms_norm") else 0)
    result = [(r, n)] * len(xs) if op != "logsumexp" else [(r,)]
    shapes = xs + parameters + (result if cotangent else [])
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    made = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    count = len(xs) + len(parameters)
    return (*made[:count], made[count] if len(result) == 1 else tuple(made[count:])) if cotangent else tuple(made)


def programs(op: str, r: int, n: int, dtype: str) -> dict:
    """The compiled programs by (implementation, with gradients); any thread may make them."""
    options = {"axis": -1} if op == "logsumexp" else {}
    made = {}
    for name, implementation in (("jtops", "triton"), ("xla", "xla")):
        f = functools.partial(SPECS[op].function, implementation=implementation, **options)
        for backward in (False, True):
            types = jax.eval_shape(functools.partial(operands, op, r, n, dtype, 0, backward))
            made[name, backward] = jax.jit(with_gradients(f) if backward else functools.partial(f)).lower(*types).compile()
    return made


def measured(case: tuple, made: dict) -> dict:
    """One row of the table: seconds of all programs, timed together, and their shares of a copy's speed."""
    op, r, n, dtype = case
    samples: dict = {key: [] for key in made}
    for backward in (False, True):
        inputs = harness.copies(lambda seed: operands(op, r, n, dtype, seed, backward))
        got, want = (made[name, backward](*inputs[0]) for name in ("jtops", "xla"))
        off = float(disagreement(got, want))
        assert off < (4e-2 if dtype == "bfloat16" else 2e-3), (case, off)
        del got, want
        for turn in range(ROUNDS):
            for name in ("jtops", "xla"):
                samples[name, backward].append(harness.device_seconds(made[name, backward], inputs[turn % len(inputs)]))
    size = r * n * jnp.dtype(dtype).itemsize
    wide = 2 if op.startswith("add_") else 1
    moved = {False: size * (1 if op == "logsumexp" else 2 * wide), True: size * (2 if op == "logsumexp" else 2 + wide)}
    row = {"op": op, "rows": r, "features": n, "dtype": dtype}
    for name in ("jtops", "xla"):
        forward, both = (statistics.median(samples[name, b]) for b in (False, True))
        for backward, seconds in ((False, forward), (True, both - forward)):
            way = "backward" if backward else "forward"
            row[f"{name}_{way}_us"] = seconds * 1e6
            row[f"{name}_{way}_of_copy"] = moved[backward] / seconds / harness.copy_speed(moved[backward])
    return row


def line(row: dict) -> str:
    """A row as text."""
    shares = [f"{row[f'{name}_{way}_us']:9.1f} us {row[f'{name}_{way}_of_copy']:5.2f}" for way in WAYS for name in ("jtops", "xla")]
    return f"{row['op']:15}{row['rows']:>7} x {row['features']:<7}{row['dtype']:9}" + "".join(shares)


WAYS = ("forward", "backward")
HEAD = f"{'':42}" + "".join(f"{f'{way}, {name}':>18}" for way in WAYS for name in ("jtops", "XLA"))


def picture(rows: list[dict], path) -> None:
    """A panel per swept op and way."""
    fig = Figure(figsize=(5 * len(SWEPT), 6), layout="constrained")
    axes = fig.subplots(2, len(SWEPT), sharex=True, sharey=True)
    for (i, way), (j, op) in ((a, b) for a in enumerate(WAYS) for b in enumerate(SWEPT)):
        mine = sorted((r for r in rows[: len(SWEPT) * len(WIDTHS)] if r["op"] == op), key=lambda r: r["features"])
        for name, style in (("jtops", "C0o-"), ("xla", "0.6")):
            label = {"xla": "XLA"}.get(name, name)
            axes[i, j].plot([r["features"] for r in mine], [r[f"{name}_{way}_of_copy"] for r in mine], style, label=label, ms=3)
        axes[i, j].axhline(1, color="C3", ls="--", lw=1)
        axes[i, j].set(xscale="log", ylim=(0, 1.2), title=f"{op}, {way}")
        axes[i, j].grid(alpha=0.3)
    for ax in axes[1]:
        ax.set_xlabel("features")
    for ax in axes[:, 0]:
        ax.set_ylabel("share of a copy's speed")
    axes[0, 0].legend(loc="lower center")
    fig.suptitle(f"{jax.devices()[0].device_kind}, bfloat16")
    fig.savefig(path, dpi=120)


def main() -> None:
    """Measure, print and write; programs are compiled ahead in threads."""
    machine.need_gpu()
    rows: list[dict] = []
    about = machine.describe()
    path = machine.record_path("sweep", about)
    print(HEAD)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        pending = [pool.submit(programs, *case) for case in CASES]
        for i, (case, future) in enumerate(zip(CASES, pending, strict=True)):
            rows.append(measured(case, future.result()))
            pending[i] = None  # its programs may go
            print(line(rows[-1]), flush=True)
            path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    picture(rows, path.with_suffix(".png"))
    print(f"record and picture: {path.name}, {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
