"""Every op x its real sizes x {jtops, XLA, peers} x {forward, forward and backward}: ``pytest --benchmark``.

It needs a GPU, and checks each case for right values first. It ends with a table, and writes JSON and a picture under
benchmarks/results.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import harness, machine
from benchmarks.peers import PEERS
from jtops.kernels._lib import spec
from jtops.kernels.specs import SPECS

OTHERS = sorted({name for peers in PEERS.values() for name in peers})
CASES = [(op, case) for op in SPECS.values() for case in op.compiled]
RUNS = [(op, case, name) for op, case in CASES for name in ("jtops", "xla", *PEERS.get(op.name, {}))]
rows: list[dict] = []  # one per measured line of the table


class OnDevice:
    """The part of a NumPy generator that drawers use; normal numbers, of which there are many, are made on the device."""

    def __init__(self, seed):
        self.keys = iter(jax.random.split(jax.random.key(seed), 16))
        self.random, self.integers = (rng := np.random.default_rng(seed)).random, rng.integers

    def normal(self, mean, std, shape):
        return mean + std * jax.random.normal(next(self.keys), shape)


def operands(case, dtype, seed):
    rng = OnDevice(seed)
    return tuple(jnp.asarray(i.draw(rng), i.dtype or dtype) for i in case.given)


def with_gradients(f):
    """The value, and the gradients of all floating operands for cotangents of all results, which are given last."""
    program = spec.with_gradients(f)
    return lambda *args: program(*args[:-1], cotangent=args[-1])


@jax.jit
def disagreement(got, want):
    """The largest difference, relative to the largest element of each leaf; on the device, for large results."""
    wide = lambda x: x.astype(jnp.float32)
    one = lambda a, b: jnp.max(jnp.abs(wide(a) - wide(b))) / jnp.maximum(jnp.max(jnp.abs(wide(b))), 1e-30)
    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(one, got, want))))


@functools.cache
def measured(op_name: str, case_id: str, dtype: str, backward: bool) -> dict:
    """All implementations of a case, timed together once; the tests replay it."""
    op, case = next((s, c) for s, c in CASES if (s.name, c.id) == (op_name, case_id))
    forward = {name: op.call(case, implementation=i) for name, i in (("jtops", "triton"), ("xla", "xla"))}
    given = operands(case, dtype, 0)
    by_name = case.keywords(given)
    for name, peer in PEERS.get(op_name, {}).items():
        if (f := peer(**by_name, **case.options)) is not None:
            forward[name] = lambda *operands, f=f: f(**case.keywords(operands))
    out = jax.eval_shape(forward["xla"], *given)
    result = jax.tree.map(lambda t: np.broadcast_to(np.zeros((), t.dtype), t.shape), out)  # has nbytes, takes no memory
    moved = op.forward_bytes(result, **by_name)
    flops = op.forward_flops and op.forward_flops(case.options, **by_name)
    make, fs = functools.partial(operands, case, dtype), forward
    if backward:
        moved += op.backward_bytes(result, **by_name)
        flops = flops and flops + op.backward_flops(case.options, **by_name)
        fs = {name: with_gradients(f) for name, f in forward.items()}
        make = lambda seed: (
            *operands(case, dtype, seed),
            jax.tree.map(lambda t: jax.random.normal(jax.random.key(1000 + seed), t.shape, t.dtype), out),
        )
    want = jax.jit(fs["xla"])(*make(0))
    for name in fs:
        off = float(disagreement(jax.jit(fs[name])(*make(0)), want))
        assert off < (3e-2 if dtype == "bfloat16" else 2e-3), (name, off)
    timings = harness.measure(fs, make)
    row = {"op": op_name, "case": case_id, "dtype": dtype, "backward": backward, "bytes": moved, "flops": flops}
    # Work is what bounds the op: floating-point operations, or bytes.
    work, ceiling = (flops, harness.matmul_speed(dtype)) if flops else (moved, harness.copy_speed(moved))
    row |= {"unit": "TFLOP/s" if flops else "GB/s", "ceiling": ceiling / (1e12 if flops else 1e9)}
    for name, timing in timings.items():
        row[f"{name}_us"] = timing.median * 1e6
        row[f"{name}_spread"] = timing.spread
        row[f"{name}_speed"] = work / timing.median / (1e12 if flops else 1e9)
    best = min((name for name in timings if name != "jtops"), key=lambda name: row[f"{name}_us"])
    row |= {"of_ceiling": row["jtops_speed"] / row["ceiling"], "best_peer": best, "over_best": row[f"{best}_us"] / row["jtops_us"]}
    rows.append(row)
    return {"row": row, "timings": {name: dataclasses.asdict(t)["samples"] for name, t in timings.items()}}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("op", "case", "implementation"), RUNS, ids=[f"{s.name}-{c.id}-{name}" for s, c, name in RUNS])
def test_op(op, case, implementation, dtype, backward, benchmark_replay):
    result = measured(op.name, case.id, dtype, backward)
    if implementation not in result["timings"]:
        pytest.skip(f"{implementation} has no {op.name} of {dtype}")
    benchmark_replay(result["timings"][implementation], result["row"])


def table() -> str:
    head = f"{'op':16}{'case':12}{'dtype':10}{'':18}{'jtops us':>10}{'xla us':>10}{'speed':>9}{'of ceiling':>17}{'over best':>11}"
    lines = [head, "-" * len(head)]
    for r in rows:
        way, mark = "forward+backward" if r["backward"] else "forward", "  slower" if r["over_best"] < 1 else ""
        lines.append(
            f"{r['op']:16}{r['case']:12}{r['dtype']:10}{way:18}{r['jtops_us']:10.1f}{r['xla_us']:10.1f}{r['jtops_speed']:8.0f} "
            f"{r['unit']:8}{r['of_ceiling']:10.2f}{r['over_best']:9.2f}x {r['best_peer']:6}{mark}"
        )
    lines.append(
        "The ceiling is a copy of as many bytes, or XLA's product of two 8192 x 8192 matrices of that dtype, in the same run."
    )
    return "\n".join(lines)


def picture(path) -> None:
    """Speed over the ceiling of the same run: jtops, XLA and the best other peer."""
    fig = Figure(figsize=(11, 0.3 * len(rows) + 1.5), layout="constrained")
    ax = fig.subplots()
    y = np.arange(len(rows))[::-1]
    share = lambda name: [r.get(f"{name}_speed", np.nan) / r["ceiling"] for r in rows]
    ax.barh(y + 0.2, share("jtops"), 0.4, label="jtops", color="C0")
    ax.barh(y - 0.2, share("xla"), 0.4, label="XLA", color="0.7")
    for i, name in enumerate(OTHERS):
        ax.plot(share(name), y, "d", color=f"C{i + 1}", markersize=6, label=name)
    ax.axvline(1, color="C3", linewidth=1)
    ax.set_yticks(y, [f"{r['op']} {r['case']} {r['dtype']}{' + backward' if r['backward'] else ''}" for r in rows])
    ax.set(xlabel="share of the ceiling: a copy of as many bytes, or a large matrix product", title=jax.devices()[0].device_kind)
    ax.margins(y=0.01)
    ax.legend(loc="lower right")
    fig.savefig(path, dpi=120)


def report() -> str:
    """Table, JSON and picture of what was measured."""
    about = machine.describe()
    path = machine.record_path("ops", about)
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    picture(path.with_suffix(".png"))
    return f"{table()}\nrecord and picture: {path.name}, {path.with_suffix('.png').name}"
