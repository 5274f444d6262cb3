"""flash_attention against its peers over the shapes of real models: ``pytest --benchmark -k attention_table -s``.

It needs a GPU, and takes what is installed of cuDNN, FlashAttention-3 and tokamax. It measures the forward, and all passes of the
backward alone, by device time of interleaved rounds. Results are compared with the first peer's before they are timed. It ends with
a table, a record and a picture.
"""

import concurrent.futures
import dataclasses
import json
import statistics

import jax
import pytest
from matplotlib.figure import Figure

import jtops
from benchmarks import harness, machine
from benchmarks.peers import PEERS
from benchmarks.test_ops import disagreement

ROUNDS = 5
rows: list[dict] = []


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One call: batch, query and key lengths, query and key heads, head dim."""

    name: str
    b: int
    s: int
    h: int
    d: int
    t: int | None = None
    g: int | None = None
    causal: bool | str = False
    window: tuple | None = None
    dtype: str = "bfloat16"
    deterministic: bool | None = None

    @property
    def options(self) -> dict:
        """The options that peers are asked for, if they have them."""
        return {"causal": self.causal} | ({"window": self.window} if self.window else {})

    def operands(self) -> tuple:
        t, g = self.t or self.s, self.g or self.h
        shapes = ((self.b, self.s, self.h, self.d), (self.b, t, g, self.d), (self.b, t, g, self.d))
        return tuple(jax.random.normal(jax.random.key(i), shape, self.dtype) for i, shape in enumerate(shapes))

    def flops(self) -> int:
        """The operations of the forward: two products over the keys that each query sees."""
        t = self.t or self.s
        shift = t - self.s if self.causal == "bottom_right" else 0
        left, right = self.window or (None, None)
        right = 0 if self.causal else right
        seen = 0
        for i in range(self.s):
            low = 0 if left is None else max(0, i + shift - left)
            high = t if right is None else min(t, i + shift + right + 1)
            seen += max(0, high - low)
        return 4 * self.b * self.h * self.d * seen


def _square(d: int, causal: bool) -> list[Shape]:
    of = [(16, 1024), (4, 4096), (1, 16384)]
    return [Shape(f"d{d}{' causal' * causal} {b}x{s}", b, s, 2048 // d, d, causal=causal) for b, s in of]


SHAPES = [
    *(shape for d in (128, 64) for causal in (False, True) for shape in _square(d, causal)),
    *(Shape(f"32/8 heads causal {b}x{s}", b, s, 32, 128, g=8, causal=True) for b, s in ((8, 2048), (4, 4096), (1, 32768))),
    Shape("28/4 heads causal 4x4096", 4, 4096, 28, 128, g=4, causal=True),
    Shape("16/1 heads causal 4x4096", 4, 4096, 16, 128, g=1, causal=True),
    Shape("d256 4x4096", 4, 4096, 8, 256),
    Shape("d256 causal 4x4096", 4, 4096, 8, 256, causal=True),
    Shape("d80 4x4096", 4, 4096, 16, 80),
    Shape("d96 causal 4x4096", 4, 4096, 16, 96, causal=True),
    Shape("d192 causal 4x4096", 4, 4096, 8, 192, causal=True),
    Shape("577 32x577", 32, 577, 16, 64),
    Shape("1000 16x1000", 16, 1000, 16, 128),
    Shape("5000 causal 4x5000", 4, 5000, 16, 128, causal=True),
    Shape("8191 causal 2x8191", 2, 8191, 16, 128, causal=True),
    Shape("1024 of 8192 keys", 8, 1024, 16, 128, t=8192),
    Shape("window 1023, 32/8 heads 4x4096", 4, 4096, 32, 128, g=8, causal=True, window=(1023, None)),
    Shape("float16 d128 4x4096", 4, 4096, 16, 128, dtype="float16"),
    Shape("deterministic d128 4x4096", 4, 4096, 16, 128, deterministic=True),
    Shape("deterministic d128 causal 4x4096", 4, 4096, 16, 128, causal=True, deterministic=True),
]


def implementations(shape: Shape) -> dict:
    """jtops and every peer that has this call."""
    more = {} if shape.deterministic is None else {"deterministic": shape.deterministic}
    found = {"jtops": lambda q, k, v: jtops.flash_attention(q, k, v, **shape.options, **more)}
    for name, peer in PEERS["flash_attention"].items():
        if shape.window is None and (f := peer(*shape.operands(), **shape.options)) is not None:
            found[name] = f
    return found


def prepared(shape: Shape) -> dict[tuple[str, str], tuple]:
    """The compiled programs and their operands by (implementation, way): the forward, and the backward alone."""
    q, k, v = shape.operands()
    do = jax.random.normal(jax.random.key(9), q.shape, q.dtype)
    programs = {}
    for name, f in implementations(shape).items():
        try:
            programs[name, "forward"] = (jax.jit(f).lower(q, k, v).compile(), (q, k, v))
            saved, tree = jax.tree.flatten(jax.eval_shape(lambda *a, f=f: jax.vjp(f, *a)[1], q, k, v))
            backward = jax.jit(lambda saved, g, tree=tree: tree.unflatten(saved)(g)).lower(saved, do).compile()
            ahead = jax.jit(lambda *a, f=f: jax.tree.leaves(jax.vjp(f, *a)[1])).lower(q, k, v).compile()
            programs[name, "backward"] = (backward, (ahead, (q, k, v), do))
        except Exception as error:  # a peer that lacks the shape is no failure of ours
            if name == "jtops":
                raise
            print(f"{shape.name}: {name} has none: {str(error)[:120]}", flush=True)
    return programs


def measure(shapes: list[Shape]) -> list[dict]:
    """Time all of them, round by round."""
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        everything = dict(zip(shapes, pool.map(prepared, shapes), strict=True))
    found = []
    for shape, programs in everything.items():
        row = {"shape": dataclasses.asdict(shape), "flops": shape.flops()}
        for way in ("forward", "backward"):
            ready, samples, want = {}, {}, None
            for name in sorted({n for n, w in programs if w == way}, key=lambda n: (n == "jtops", n)):
                program, args = programs[name, way]
                args = args if way == "forward" else (args[0](*args[1]), args[2])
                got = program(*args)
                want = got if want is None else want
                row[f"{name}_{way}_off"] = float(disagreement(got, want))
                ready[name], samples[name] = (program, args), []
            for _ in range(ROUNDS):
                for name, (program, args) in ready.items():
                    samples[name].append(harness.device_seconds(program, args))
            for name, seconds in samples.items():
                work = row["flops"] * (1 if way == "forward" else 2.5)  # five products
                row[f"{name}_{way}"] = work / statistics.median(seconds) / 1e12
                row[f"{name}_{way}_spread"] = (max(seconds) - min(seconds)) / 2 / statistics.median(seconds)
        found.append(row)
        print(_line(row), flush=True)
    return found


def _line(row: dict) -> str:
    text = f"{row['shape']['name']:36}"
    for way in ("forward", "backward"):
        ours = row[f"jtops_{way}"]
        peers = {n: row[f"{n}_{way}"] for n in PEERS["flash_attention"] if f"{n}_{way}" in row}
        best = max(peers, key=peers.get) if peers else None
        ratio = f"{ours / peers[best]:.2f}x {best}" if best else "no peer"
        text += f"{way} {ours:6.0f} TFLOP/s {ratio:15}" + " ".join(f"{n} {x:4.0f}" for n, x in peers.items()) + "   "
    return text


def picture(path) -> None:
    """Ratio to the best peer, forward and backward."""
    fig = Figure(figsize=(11, 0.32 * len(rows) + 1.5), layout="constrained")
    ax = fig.subplots()
    for offset, way in ((0.2, "forward"), (-0.2, "backward")):
        best = [max((r[f"{n}_{way}"] for n in PEERS["flash_attention"] if f"{n}_{way}" in r), default=float("nan")) for r in rows]
        at = [len(rows) - i + offset for i in range(len(rows))]
        ax.barh(at, [r[f"jtops_{way}"] / b for r, b in zip(rows, best, strict=True)], 0.4, label=way)
    ax.axvline(1, color="C3", linewidth=1)
    ax.set_yticks([len(rows) - i for i in range(len(rows))], [r["shape"]["name"] for r in rows])
    ax.set(xlabel="speed over that of the best of cuDNN, FlashAttention-3 and tokamax", title=jax.devices()[0].device_kind)
    ax.margins(y=0.01)
    fig.legend(loc="outside lower center", ncols=2)
    fig.savefig(path, dpi=120)


def test_attention_table():
    rows.extend(measure(SHAPES))
    about = machine.describe()
    path = machine.record_path("attention", about)
    ceiling = harness.matmul_speed("bfloat16") / 1e12
    path.write_text(json.dumps({**about, "matmul_tflops": ceiling, "rows": rows}, indent=1) + "\n")
    picture(path.with_suffix(".png"))
    print(
        f"bfloat16 matmul in the same run: {ceiling:.0f} TFLOP/s; record and picture: {path.name}, {path.with_suffix('.png').name}"
    )
    for row in rows:
        for way in ("forward", "backward"):
            limit = 3e-2
            assert row[f"jtops_{way}_off"] < limit, (row["shape"]["name"], way, row[f"jtops_{way}_off"])


if __name__ == "__main__":
    pytest.main([__file__, "--benchmark", "-s", "-k", "attention_table"])
