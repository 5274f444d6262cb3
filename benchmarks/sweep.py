"""Row ops over their width: ``python -m benchmarks.sweep``. GB/s of jtops and XLA, forward and backward, for 64 to 262144 features.

Every width has as many elements (2^25, bfloat16), so that a copy takes the same time for all. Writes JSON and a picture under
benchmarks/results.
"""

import functools
import json

import jax
from matplotlib.figure import Figure

from benchmarks import harness, machine
from benchmarks.test_ops import with_gradients
from tests.specs import SPECS

OPS = ("softmax", "layer_norm", "rms_norm")
ELEMENTS, DTYPE, ROUNDS = 2**25, "bfloat16", 5
WIDTHS = sorted({2**i for i in range(6, 19)} | {3 * 2**i for i in (8, 10, 12, 14)} | {1000, 50257})


def operands(op: str, n: int, seed: int) -> tuple:
    """Random x and parameters of width n."""
    shapes = [(ELEMENTS // n, n), *[(n,)] * {"layer_norm": 2, "rms_norm": 1}.get(op, 0)]
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(jax.random.normal(key, shape, DTYPE) for key, shape in zip(keys, shapes, strict=True))


def measured(op: str, n: int, backward: bool) -> dict:
    """Both implementations, timed together."""
    f = SPECS[op].function
    fs = {name: functools.partial(f, implementation=i) for name, i in (("jtops", "triton"), ("xla", "xla"))}
    make = functools.partial(operands, op, n)
    arrays = 5 if backward else 2  # forward: x, y; backward: besides, x or y, its cotangent and dx
    if backward:
        fs = {name: with_gradients(f) for name, f in fs.items()}
        make = lambda seed: (*operands(op, n, seed), operands("softmax", n, 1000 + seed)[0])
    timings = harness.measure(fs, make, ROUNDS)
    moved = arrays * make(0)[0].nbytes
    row = {"op": op, "n": n, "backward": backward, "bytes": moved, "ceiling": harness.copy_speed(2 * make(0)[0].nbytes) / 1e9}
    return row | {f"{name}_speed": moved / t.median / 1e9 for name, t in timings.items()}


def picture(rows: list[dict], path) -> None:
    """A panel per op and way."""
    fig = Figure(figsize=(4 * len(OPS), 6), layout="constrained")
    axes = fig.subplots(2, len(OPS), sharex=True, sharey=True)
    for (i, backward), (j, op) in ((a, b) for a in enumerate((False, True)) for b in enumerate(OPS)):
        ax, mine = axes[i, j], [r for r in rows if (r["op"], r["backward"]) == (op, backward)]
        for name, style in (("jtops", "C0o-"), ("xla", "0.6")):
            ax.plot([r["n"] for r in mine], [r[f"{name}_speed"] for r in mine], style, label={"xla": "XLA"}.get(name, name), ms=3)
        ax.plot([r["n"] for r in mine], [r["ceiling"] for r in mine], "C3--", lw=1, label="copy")
        ax.set(xscale="log", ylim=(0, None), title=f"{op}{' forward and backward' if backward else ''}")
        ax.grid(alpha=0.3)
        ax.label_outer()
    for ax in axes[1]:
        ax.set_xlabel("features")
    for ax in axes[:, 0]:
        ax.set_ylabel("GB/s")
    axes[0, 0].legend(loc="lower center")
    fig.suptitle(f"{jax.devices()[0].device_kind}, {DTYPE}, 2^25 elements")
    fig.savefig(path, dpi=120)


def main() -> None:
    """Measure, print and write."""
    rows = []
    for op in OPS:
        for backward in (False, True):
            for n in WIDTHS:
                rows.append(measured(op, n, backward))
                r = rows[-1]
                way = "forward+backward" if backward else "forward"
                print(
                    f"{op:12} {way:16} {n:7} jtops {r['jtops_speed']:6.0f}  xla {r['xla_speed']:6.0f}  copy {r['ceiling']:6.0f}",
                    flush=True,
                )
    about = machine.describe()
    path = machine.record_path("sweep", about)
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    picture(rows, path.with_suffix(".png"))
    print(f"record and picture: {path.name}, {path.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
