"""Two checkouts of jtops against each other on this GPU: ``python -m benchmarks.before_after OTHER_CHECKOUT``.

Each is measured twice, in turns, in processes of its own: device time of every op at sizes that matter, forward and with gradients,
bfloat16. Attention is measured with the kernels for every GPU, which both have. Writes a record; a case that is slower by more than
2 % beyond what its own rounds differ by is named.
"""

# ruff: noqa: PLC0415 - measured in processes of their own, where jax and jtops must be imported from the checkout measured
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 5
WIDTHS = {256: 65536, 1024: 8192, 4096: 8192, 5120: 8192, 16384: 4096, 32768: 8192, 131072: 1024, 50257: 2048}


def cases():
    """Name -> function and operands. `jtops` is the one on PYTHONPATH."""
    import jax
    import jax.numpy as jnp

    import jtops

    found = {}
    array = lambda i, *shape, dtype=jnp.bfloat16: jax.random.normal(jax.random.key(i), shape, dtype)

    def add(name, f, *operands):
        def both(*operands):
            y, pullback = jax.vjp(f, *operands)
            return y, pullback(jax.tree.map(jnp.ones_like, y))

        found[name], found[f"{name}, with gradients"] = (f, operands), (both, operands)

    for n, r in WIDTHS.items():
        x, scale, bias = array(1, r, n), array(2, n), array(3, n)
        add(f"softmax {r}x{n}", jtops.softmax, x)
        add(f"layer_norm {r}x{n}", jtops.layer_norm, x, scale, bias)
        add(f"rms_norm {r}x{n}", jtops.rms_norm, x, scale)
        if n in (4096, 32768):
            add(f"logsumexp {r}x{n}", lambda x: jtops.logsumexp(x, axis=-1), x)
            add(f"log_softmax {r}x{n}", jtops.log_softmax, x)
        if n in (4096, 16384):
            add(f"add_rms_norm {r}x{n}", jtops.add_rms_norm, x, x, scale)
            add(f"softmax of axis 0 {r}x{n}", lambda x: jtops.softmax(x, axis=0), x)
    add("add 4096x4096", jtops.add, array(1, 4096, 4096), array(2, 4096, 4096))
    add("add a row", jtops.add, array(1, 8192, 4096), array(2, 4096))
    add("add a column", jtops.add, array(1, 8192, 4096), array(2, 8192, 1))
    for m, k, n in ((4096, 4096, 4096), (8192, 8192, 8192), (16, 4096, 4096), (5000, 4096, 11008)):
        add(f"matmul {m}x{k}x{n}", jtops.matmul, array(1, m, k), array(2, k, n))
    gelu = lambda a, b, bias: jtops.matmul(a, b, bias=bias, activation="gelu")
    add("matmul, bias, gelu", gelu, array(1, 16384, 1024), array(2, 1024, 4096), array(3, 4096))
    try:
        portable = {"config": jtops.Config(variant="portable")}
    except (TypeError, ValueError):  # an older checkout has no others
        portable = {}
    for d, causal in ((64, False), (64, True), (128, False), (128, True), (256, False)):
        attention = lambda q, k, v, causal=causal: jtops.flash_attention(q, k, v, causal=causal, **portable)
        add(f"attention d{d}{', causal' * causal}", attention, *(array(i, 4, 4096, 2048 // d, d) for i in range(3)))
    return found


def measure(path: str) -> None:
    """Write the samples of the checkout on PYTHONPATH."""
    import jax
    from jax.experimental.mosaic.gpu import profiler

    found = cases()
    compiled = {name: jax.jit(f) for name, (f, _) in found.items()}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda name: jax.block_until_ready(compiled[name](*found[name][1])), found))
    samples: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(ROUNDS):
        for name, (_, operands) in found.items():
            samples[name].append(profiler.measure(compiled[name], aggregate=True)(*operands)[1] * 1e3)
    Path(path).write_text(json.dumps(samples))


def main(other: str) -> int:
    from benchmarks import machine

    machine.need_gpu()
    here = Path(__file__).parent.parent
    samples: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2):
            for side, root in (("before", other), ("after", here)):
                path = f"{folder}/{side}-{turn}"
                env = os.environ | {"PYTHONPATH": str(root), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                subprocess.run([sys.executable, __file__, "--measure", path], env=env, check=True)
                for name, times in json.loads(Path(path).read_text()).items():
                    samples[side].setdefault(name, []).extend(times)
    rows = record(samples)
    about = machine.describe()
    path = machine.record_path("before-after", about)
    path.write_text(json.dumps({**about, "unit": "us", "rows": rows}, indent=1) + "\n")
    slower = [row for row in rows if row["slower"]]
    for row in rows:
        print(f"{row['case']:44}{row['before']:10.1f}{row['after']:10.1f}{row['ratio']:8.3f}{'  slower' * row['slower']}")
    print(f"{len(slower)} of {len(rows)} slower; geometric mean of after / before "
          f"{statistics.geometric_mean(row['ratio'] for row in rows):.3f}; record {path.name}")  # fmt: skip
    return len(slower) > 0


def record(samples: dict[str, dict[str, list[float]]]) -> list[dict]:
    """A row per case: medians, half ranges, and whether it is slower by more than 2 % beyond the larger half range."""
    rows = []
    for name in samples["before"]:
        medians = {side: statistics.median(times[name]) for side, times in samples.items()}
        spreads = {side: (max(times[name]) - min(times[name])) / 2 / medians[side] for side, times in samples.items()}
        ratio = medians["after"] / medians["before"]
        row = {"case": name, **medians, "ratio": ratio, "before_spread": spreads["before"], "after_spread": spreads["after"]}
        rows.append(row | {"slower": ratio > 1.02 + max(spreads.values())})
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        raise SystemExit(main(*sys.argv[1:]))
