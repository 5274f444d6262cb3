"""What a launch costs the host, by launch path: ``python -m benchmarks.launch_cost``.

It times a chain of 200 small kernels in one jitted program, from call to completion, and divides by 200: XLA's own fusion, and a
Triton kernel of the same maths by each path, with the CUDA graphs that XLA makes by default and without. A second kernel has much
text, a third one takes tensor descriptors. Values are checked; the record is written under benchmarks/results.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import jtops
from benchmarks import machine
from jtops._compat.triton import tl, triton

ROOT = Path(__file__).parent.parent
LAUNCHES, ROUNDS, SIZE = 200, 30, 4096
TARGETS = {"graphs": 1.3, "no graphs": 1.15}  # of the quickest path, over XLA's own fusion


@triton.jit
def step_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr = 1024):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(o_ptr + i, x * 1.0001 + 1, mask=i < n)


@triton.jit
def long_step_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr = 1024):
    """The same step in much text: the sines are never needed."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    for j in tl.static_range(4):
        x = tl.where(x > 1e30, tl.sin(x) + j, x)
    tl.store(o_ptr + i, x * 1.0001 + 1, mask=i < n)


@triton.jit
def descriptor_step_kernel(x_desc, o_desc):
    o_desc.store([0, 0], x_desc.load([0, 0]) * 1.0001 + 1)


def by_xla(x):
    return jax.lax.optimization_barrier(x * 1.0001 + 1)


def by_kernel(kernel):
    def step(x):
        return jtops.triton_call(
            x, n=x.size, kernel=kernel, out_type=x, grid=lambda meta: jtops.cdiv(x.size, meta["BLOCK"]), num_warps=4
        )  # fmt: skip

    return step


def by_descriptors(x):
    tile = lambda base: jtops.TensorDescriptor.from_array(base, (64, 64))
    out = tile(jax.ShapeDtypeStruct((64, 64), x.dtype))
    y = jtops.triton_call(tile(x.reshape(64, 64)), kernel=descriptor_step_kernel, out_type=out, grid=1, num_warps=4)
    return y.reshape(x.shape)


IMPLEMENTATIONS = {
    "xla": (by_xla, None),
    "ffi": (by_kernel(step_kernel), "ffi"),
    "ptx": (by_kernel(step_kernel), "ptx"),
    "ffi, long text": (by_kernel(long_step_kernel), "ffi"),
    "ptx, long text": (by_kernel(long_step_kernel), "ptx"),
    "ffi, descriptors": (by_descriptors, "ffi"),
}


def chain(step):
    def f(x):
        for _ in range(LAUNCHES):
            x = step(x)
        return x

    return f


def measure() -> dict[str, dict[str, float]]:
    """Microseconds per launch of every implementation, interleaved, in this process."""
    x = jnp.linspace(0.0, 1.0, SIZE)
    programs, compile_seconds = {}, {}
    for name, (step, path) in IMPLEMENTATIONS.items():
        start = time.perf_counter()
        with jtops.config.launch(path):
            programs[name] = jax.jit(chain(step)).lower(x).compile()
        compile_seconds[name] = time.perf_counter() - start
    want = programs["xla"](x)
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for name, f in programs.items():
        for _ in range(3):  # the first runs load kernels and record graphs
            got = jax.block_until_ready(f(x))
        if not jnp.allclose(got, want, rtol=1e-4):
            raise RuntimeError(f"{name}: wrong values")
    for _ in range(ROUNDS):
        for name, f in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(f(x))
            samples[name].append((time.perf_counter() - start) / LAUNCHES * 1e6)
    return {
        name: {"us": round(statistics.median(s), 3), "min_us": round(min(s), 3), "compile_s": round(compile_seconds[name], 2)}
        for name, s in samples.items()
    }


def in_process(flags: str) -> dict:
    """`measure` in a process of its own, with further XLA flags."""
    env = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.launch_cost", "--one"]
    return json.loads(subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", action="store_true", help="measure in this process and print JSON")
    if parser.parse_args().one:
        print(json.dumps(measure()))
        return 0
    machine.need_gpu()
    runs = {"graphs": in_process(""), "no graphs": in_process("--xla_gpu_enable_command_buffer=")}
    over = {mode: {n: round(r["us"] / run["xla"]["us"], 3) for n, r in run.items()} for mode, run in runs.items()}
    met = {mode: min(over[mode]["ffi"], over[mode]["ptx"]) <= limit for mode, limit in TARGETS.items()}
    about = machine.describe()
    path = machine.record_path("launch", about)
    record = {**about, "launches": LAUNCHES, "rounds": ROUNDS, "targets": TARGETS, "met": met, "over_xla": over, "runs": runs}
    path.write_text(json.dumps(record, indent=1) + "\n")
    for mode, run in runs.items():
        for name, r in run.items():
            print(
                f"{mode:10} {name:16} {r['us']:7.2f} us a launch, {over[mode][name]:.2f}x XLA, compiled in {r['compile_s']:.1f} s"
            )
        print(f"{mode:10} at most {TARGETS[mode]}x XLA: {'met' if met[mode] else 'missed'}")
    print(path.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
