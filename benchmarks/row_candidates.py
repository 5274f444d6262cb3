"""Times candidate Configs of the row ops on this GPU: ``python -m benchmarks.row_candidates RESULT.json [seconds]``.

Prints, per op, way and shape, the best candidates and their share of a copy of as many bytes; the JSON has all. What does not fit
in the given time (150 s) is left out, from the end of the list.
"""

import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

import jtops
from benchmarks import harness, machine

INF, ROUNDS = 1 << 30, 5
BF16, F32 = "bfloat16", "float32"


@dataclasses.dataclass(frozen=True)
class Run:
    op: str
    backward: bool
    r: int
    n: int
    dtype: str
    config: tuple[int, int, int, int, int] | None  # BLOCK_M, BLOCK_N, PROGRAMS, num_warps, num_stages; None: the op's own choice

    @property
    def key(self):
        return self.op, self.backward, self.r, self.n, self.dtype

    def types(self):
        x, p = jax.ShapeDtypeStruct((self.r, self.n), self.dtype), jax.ShapeDtypeStruct((self.n,), self.dtype)
        return {"layer_norm": (x, p, p), "rms_norm": (x, p)}.get(self.op, (x,))

    def function(self, implementation="triton"):
        config = None
        if self.config and implementation == "triton":
            m, n, programs, warps, stages = self.config
            config = jtops.Config(BLOCK_M=m, BLOCK_N=n, PROGRAMS=programs, num_warps=warps, num_stages=stages)
        f = lambda *a: getattr(jtops, self.op)(*a, implementation=implementation, config=config)
        if not self.backward:
            return f
        return lambda *a: jax.vjp(f, *a[:-1])[1](a[-1])

    def all_types(self):
        out = self.types()
        return (*out, out[0]) if self.backward else out

    def bytes(self):
        x, *p = (t.size * t.dtype.itemsize for t in self.types())
        return (3 if self.backward else 2) * x + (2 if self.backward else 1) * sum(p)


W = {  # (op, backward, r, n, dtype): candidates
    ("layer_norm", True, 8192, 4096, BF16): [
        (1, 4096, 256, 4, 4),
        (1, 4096, 256, 4, 5),
        (1, 4096, 256, 8, 4),
        (1, 4096, 128, 4, 5),
        (1, 4096, 128, 8, 5),
    ],
    ("layer_norm", True, 65536, 256, BF16): [
        (16, 256, 256, 4, 4),
        (16, 256, 256, 4, 5),
        (8, 256, 512, 2, 4),
        (8, 256, 1024, 2, 3),
        (16, 256, 512, 4, 3),
        (32, 256, 256, 8, 3),
    ],
    ("layer_norm", True, 8192, 1024, BF16): [
        (4, 1024, 256, 4, 4),
        (2, 1024, 256, 2, 4),
        (2, 1024, 512, 2, 4),
        (1, 1024, 512, 1, 5),
    ],
    ("layer_norm", False, 8192, 8192, BF16): [
        (2, 8192, 128, 16, 3),
        (2, 8192, INF, 16, 1),
        (1, 8192, INF, 8, 1),
        (1, 8192, INF, 4, 1),
        (1, 8192, 128, 8, 5),
        (1, 8192, 256, 8, 3),
        (1, 8192, 128, 16, 4),
    ],
    ("layer_norm", False, 8192, 4096, BF16): [
        (1, 4096, INF, 4, 1),
        (2, 4096, INF, 8, 1),
        (4, 4096, INF, 16, 1),
        (1, 4096, 256, 8, 5),
        (1, 4096, 512, 4, 3),
    ],
    ("layer_norm", False, 8192, 5120, BF16): [
        (2, 8192, 128, 16, 3),
        (1, 8192, INF, 8, 1),
        (1, 8192, INF, 4, 1),
        (1, 8192, 256, 8, 3),
    ],
    ("layer_norm", True, 8192, 5120, BF16): [(1, 8192, 128, 16, 4), (1, 8192, 128, 8, 3)],
    ("softmax", False, 8192, 5120, BF16): [
        (1, 8192, INF, 4, 1),
        (1, 8192, INF, 16, 1),
        (2, 8192, INF, 16, 1),
        (1, 8192, 256, 8, 3),
        (1, 8192, 512, 8, 3),
    ],
    ("softmax", True, 8192, 5120, BF16): [(1, 8192, INF, 4, 1), (1, 8192, INF, 16, 1), (1, 8192, 256, 8, 3), (1, 8192, 128, 16, 4)],
    ("layer_norm", False, 8192, 16384, BF16): [(1, 16384, 128, 16, 4), (1, 16384, INF, 16, 1)],
    ("layer_norm", False, 8192, 32768, BF16): [
        (1, 8192, 1024, 32, 3),
        (1, 16384, 1024, 32, 3),
        (1, 16384, 1024, 32, 1),
        (1, 32768, INF, 32, 1),
    ],
    ("layer_norm", True, 8192, 16384, BF16): [
        (1, 16384, 128, 32, 2),
        (1, 8192, 512, 16, 3),
        (2, 4096, 512, 8, 3),
        (1, 4096, 256, 8, 4),
    ],
    ("rms_norm", True, 8192, 16384, BF16): [(1, 16384, 128, 32, 2)],
    ("layer_norm", False, 64, 131072, BF16): [
        (1, 4096, 256, 8, 1),
        (1, 4096, 256, 8, 3),
        (1, 8192, 256, 8, 3),
        (1, 2048, 512, 4, 1),
        (1, 4096, 384, 4, 1),
        (1, 8192, 128, 16, 3),
    ],
    ("layer_norm", True, 64, 131072, BF16): [
        (4, 512, 256, 4, 3),
        (8, 512, 256, 4, 3),
        (4, 1024, 256, 4, 3),
        (2, 1024, 128, 4, 5),
        (8, 256, 512, 4, 3),
    ],
    ("softmax", False, 64, 131072, BF16): [
        (1, 4096, 256, 8, 1),
        (1, 4096, 256, 8, 3),
        (1, 8192, 256, 8, 3),
        (1, 4096, 512, 8, 1),
        (1, 8192, 128, 16, 3),
    ],
    ("softmax", True, 64, 131072, BF16): [(1, 4096, 256, 8, 1), (1, 4096, 256, 8, 3), (1, 4096, 512, 8, 1), (1, 8192, 128, 16, 3)],
    ("layer_norm", False, 2048, 131072, BF16): [
        (1, 16384, 1024, 32, 3),
        (1, 16384, 1024, 32, 1),
        (1, 32768, 1024, 32, 1),
        (1, 8192, 1024, 32, 4),
        (1, 8192, 1024, 32, 1),
    ],
    ("softmax", False, 2048, 131072, BF16): [
        (1, 16384, 1024, 32, 3),
        (1, 16384, 1024, 32, 1),
        (1, 32768, 1024, 32, 1),
        (1, 32768, 1024, 32, 3),
        (1, 8192, 1024, 32, 4),
    ],
    ("softmax", True, 2048, 131072, BF16): [
        (1, 8192, 1024, 32, 3),
        (1, 16384, 1024, 32, 1),
        (1, 32768, 1024, 32, 1),
        (1, 16384, 1024, 32, 3),
    ],
    ("softmax", False, 4096, 65536, BF16): [
        (1, 65536, INF, 32, 1),
        (1, 16384, 1024, 32, 3),
        (1, 16384, 1024, 32, 1),
        (1, 32768, 1024, 32, 1),
    ],
    ("softmax", True, 4096, 65536, BF16): [(1, 16384, 1024, 32, 3), (1, 16384, 1024, 32, 1)],
    ("softmax", True, 8192, 32768, BF16): [
        (1, 32768, INF, 32, 1),
        (1, 16384, 1024, 32, 3),
        (1, 8192, 1024, 32, 3),
        (1, 8192, 1024, 16, 3),
    ],
    ("layer_norm", False, 4096, 65536, BF16): [(1, 16384, 1024, 32, 3), (1, 16384, 1024, 32, 1), (1, 65536, INF, 32, 1)],
}


def runs():
    for (op, backward, r, n, dtype), configs in W.items():
        for c in [None, *configs]:
            yield Run(op, backward, r, n, dtype, c)
    for op in ("layer_norm", "softmax", "rms_norm"):
        for r, n in [(131072, 64), (262144, 256), (8192, 1000), (8192, 2048), (8192, 3072), (32, 4096), (8192, 32768)]:
            for backward in (False, True):
                yield Run(op, backward, r, n, BF16, None)
    for backward in (False, True):
        yield Run("layer_norm", backward, 8192, 4096, F32, None)
        yield Run("rms_norm", backward, 8192, 4096, BF16, None)
        yield Run("softmax", backward, 1024, 50257, BF16, None)


def warm(run):
    """Compile into Triton's disk cache, in a process without GPU."""
    with jtops.config.target("sm_90"):
        try:
            jax.jit(run.function()).trace(*run.all_types()).lower(lowering_platforms=("cuda",))
        except Exception as e:
            print("does not compile:", run, repr(e)[:300], flush=True)


def operands(run, seed):
    keys = jax.random.split(jax.random.key(seed), 4)
    return tuple(jax.random.normal(k, t.shape, t.dtype) for k, t in zip(keys, run.all_types(), strict=False))


def compiled(run):
    try:
        return jax.jit(run.function()).lower(*run.all_types()).compile()
    except Exception as e:
        return repr(e)[:300]


def disagreement(a, b):
    a, b = a.astype(F32), b.astype(F32)
    return float(jnp.max(jnp.abs(a - b)) / (1e-30 + jnp.max(jnp.abs(b))))


def timed(run, f, inputs):
    """Median microseconds, without the forward kernels where the backward is asked for; and what each kernel takes."""
    samples, names = [], {}
    for i in range(ROUNDS):
        _, kernels = profiler.Cupti(finalize=False).measure(f, aggregate=False)(*inputs[i % len(inputs)])
        mine = [(k, ms) for k, ms in kernels if not (run.backward and "forward" in k)]
        samples.append(1e3 * sum(ms for _, ms in mine))
        names = {k: round(1e3 * ms, 1) for k, ms in mine}
    return statistics.median(samples), names


def main():
    started, path, limit = time.time(), sys.argv[1], float((sys.argv[2:] or ["150"])[0])
    todo = list(dict.fromkeys(runs()))
    os.environ["JAX_PLATFORMS"] = "cpu"
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 2)) as pool:
        warming = pool.map_async(warm, todo, chunksize=4)
        del os.environ["JAX_PLATFORMS"]
        print(jax.devices()[0].device_kind, len(todo), "candidates", flush=True)
        warming.wait(limit / 2)
        print(f"compiled after {time.time() - started:.0f} s", flush=True)
        results, inputs, key, want = [], [], None, None
        with ThreadPoolExecutor(6) as threads:
            programs = {}
            ahead = 12
            for i, run in enumerate(todo):
                if time.time() - started > limit:
                    print("out of time; left out:", len(todo) - i)
                    break
                for later in todo[i : i + ahead]:
                    if later not in programs:
                        programs[later] = threads.submit(compiled, later)
                if run.key != key:
                    key, inputs = run.key, []
                    inputs = [operands(run, s) for s in range(2 if run.bytes() > 5e7 else 8)]
                    want = jax.jit(run.function("xla"))(*inputs[0])
                f = programs.pop(run).result()
                row = {**dataclasses.asdict(run), "bytes": run.bytes()}
                if isinstance(f, str):
                    results.append({**row, "error": f})
                    print("failed", run, f, flush=True)
                    continue
                try:
                    got = jax.block_until_ready(f(*inputs[0]))
                    off = max(map(disagreement, jax.tree.leaves(got), jax.tree.leaves(want)))
                    us, kernels = timed(run, f, inputs)
                except jax.errors.JaxRuntimeError as error:
                    results.append({**row, "error": str(error)[:300]})
                    print("failed", run, str(error)[:200], flush=True)
                    continue
                results.append({**row, "us": us, "off": off, "kernels": kernels})
                print(f"{time.time() - started:4.0f} s {run.key} {run.config} {us:.1f} us", flush=True)
        ceilings = {}
        for row in results:
            size = row["bytes"]
            nearest = min((c for c in ceilings if abs(c / size - 1) < 0.1), default=None)
            if nearest is None:
                ceilings[nearest := size] = harness.copy_speed(size)
            if "us" in row:
                row["share"] = row["bytes"] / row["us"] / 1e-6 / ceilings[nearest]
        with open(path, "w") as out:
            json.dump({**machine.describe(), "rows": results}, out, indent=0)
    groups = {}
    for row in results:
        groups.setdefault(tuple(row[k] for k in ("op", "backward", "r", "n", "dtype")), []).append(row)
    for key, rows in groups.items():
        ok = sorted((r for r in rows if "us" in r), key=lambda r: r["us"])
        print(key[0], "backward" if key[1] else "forward", f"{key[2]} x {key[3]}", key[4])
        for row in ok[:3] + [r for r in ok[3:] if r["config"] is None]:
            print(f"   {row['share']:.3f}  {row['us']:8.1f} us  {row['config']}  off {row['off']:.1e}  {row['kernels']}")
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
