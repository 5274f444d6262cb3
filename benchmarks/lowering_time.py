"""What lowering costs: ``python -m benchmarks.lowering_time`` writes a record under benchmarks/results.

It times ``jax.jit(f).trace().lower()`` of the train step of a 24-layer transformer of jtops ops in a process that finds no
compiled kernels, and in a second one that finds them on disk; and the compilation of all configs of one tuned kernel, one after
the other and in threads. Without a GPU it lowers for sm_90, which takes the same path.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jtops
from benchmarks import machine
from jtops._compat.triton import tl, triton
from jtops.core import cache

ROOT = Path(__file__).parent.parent
LAYERS, BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 24, 8, 1024, 1024, 16, 32_000
CONFIGS = [(m, n, k, w) for m in (64, 128) for n in (64, 128) for k, w in ((32, 4), (64, 8))]
SMALL = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)


def layer(x, p):
    y = jtops.rms_norm(x, p["norm1"])
    q, k, v = (jtops.matmul(y, p[name]).reshape(BATCH, LENGTH, HEADS, -1) for name in ("q", "k", "v"))
    x = jtops.matmul(jtops.flash_attention(q, k, v, causal=True).reshape(x.shape), p["out"], residual=x)
    hidden = jtops.matmul(jtops.rms_norm(x, p["norm2"]), p["up"], activation="gelu")
    return jtops.matmul(hidden, p["down"], residual=x)


def loss(params, tokens):
    x = params["embedding"][tokens]
    for p in params["layers"]:
        x = layer(x, p)
    logits = jtops.matmul(jtops.rms_norm(x, params["norm"]), params["embedding"].T, preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, jnp.roll(tokens, -1, axis=1)[..., None], axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1, keepdims=True) - picked)


def train_step(params, tokens):
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value


def parameters():
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    square = {name: of(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    one = square | {"norm1": of(WIDTH), "norm2": of(WIDTH), "up": of(WIDTH, 4 * WIDTH), "down": of(4 * WIDTH, WIDTH)}
    return {"embedding": of(VOCABULARY, WIDTH), "norm": of(WIDTH), "layers": [one] * LAYERS}


def lower(f, *operands):
    """Lower for this process' GPU, or for sm_90 where there is none."""
    target = None if jax.default_backend() == "gpu" else "sm_90"
    with jtops.config.target(target), jtops.config.implementation("triton"):
        return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",))


@triton.jit
def product(a_ptr, b_ptr, o_ptr, SIZE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for start in range(0, SIZE, K):
        k = start + tl.arange(0, K)
        acc = tl.dot(tl.load(a_ptr + m[:, None] * SIZE + k[None, :]), tl.load(b_ptr + k[:, None] * SIZE + n[None, :]), acc)
    tl.store(o_ptr + m[:, None] * SIZE + n[None, :], acc.to(tl.bfloat16))


tuned = triton.autotune([triton.Config({"M": m, "N": n, "K": k}, num_warps=w) for m, n, k, w in CONFIGS], key=["SIZE"])(product)


def one_config(config):
    """Lower the tuned kernel with one config fixed by the caller."""
    m, n, k, _ = config
    grid = lambda meta: (1024 // meta["M"], 1024 // meta["N"])
    call = lambda a, b: jtops.triton_call(a, b, kernel=tuned, out_type=SMALL, grid=grid, SIZE=1024, M=m, N=n, K=k)
    return lower(call, SMALL, SMALL)


def cpu_seconds() -> float:
    """The CPU time of this process and its children (ptxas), which a busy machine does not stretch."""
    return sum(os.times()[:4])


def work(what: str) -> dict:
    """One measurement, in this process."""
    jax.default_backend()  # starting the backend is not lowering
    start, used = time.perf_counter(), cpu_seconds()
    if what == "step":
        text = lower(train_step, parameters(), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)).as_text()
        more = {"text_bytes": len(text), "launches_in_text": text.count("custom_call @")}
    else:
        with concurrent.futures.ThreadPoolExecutor(1 if what == "one by one" else os.cpu_count()) as pool:
            list(pool.map(one_config, CONFIGS))
        more = {}
    seconds, s = time.perf_counter() - start, cache.statistics()
    kernels = {"compiled": s.compiled, "from_disk": s.disk_hits, "from_memory": s.memory_hits, "in_triton": round(s.seconds, 3)}
    return {"seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds() - used, 3), **kernels, **more}


def measured(what: str, folder: Path) -> dict:
    """One measurement in a process of its own, whose compiled kernels lie in `folder`."""
    env = os.environ | {"TRITON_CACHE_DIR": str(folder), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "benchmarks.lowering_time", what]
    run = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(work(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {
            "train step, cold": measured("step", folder / "step"),
            "train step, warm": measured("step", folder / "step"),
            f"{len(CONFIGS)} configs, one by one": measured("one by one", folder / "serial"),
            f"{len(CONFIGS)} configs, in threads": measured("in threads", folder / "parallel"),
        }
    about = machine.describe()
    path = machine.record_path("lowering-time", about)
    sizes = {"layers": LAYERS, "batch": BATCH, "length": LENGTH, "width": WIDTH, "heads": HEADS, "vocabulary": VOCABULARY}
    record = {**about, "cpus": os.cpu_count(), "load": os.getloadavg()[0], "sizes": sizes, "results": results}
    path.write_text(json.dumps(record, indent=2) + "\n")
    for name, r in results.items():
        kernels = f"{r['compiled']} compiled, {r['from_disk']} from disk, {r['from_memory']} from memory"
        print(f"{name:28}{r['seconds']:8.2f} s, {r['cpu_seconds']:6.2f} s of CPU   {kernels}")
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
