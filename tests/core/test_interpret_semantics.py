"""Python's statements in a kernel mean what compiled Triton takes them to mean, by the interpreter here and by the GPU there."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.triton import tl, triton

N = 32
MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
modes = pytest.mark.parametrize("interpret", MODES)
POS, X = np.arange(N, dtype=np.int32), np.linspace(-4, 4, N, dtype=np.float32)


def run(kernel, *args, out=X, interpret=True, **kwargs):
    return np.asarray(jtops.triton_call(*args, kernel=kernel, out_type=out, **{"grid": 1} | kwargs, interpret=interpret))


@triton.jit
def bool_ops_kernel(x_ptr, o_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    odd = not (i % 2 == 0)  # noqa: SIM201
    y = 0
    if (n > 3 and n < 100) or N == 1:
        y = 1
    if not n > 3 and N > 0:
        y = 2
    tl.store(o_ptr + i, tl.where((x > 0) & odd, x, 0.0) + y)


@triton.jit
def constants_kernel(o_ptr, n, N: tl.constexpr):
    """A named constant is an int32: it wraps, its division truncates, it has methods; an annotated one is Python's."""
    big = 1 << 30
    minus: tl.constexpr = -7
    seven = -7
    count = 0
    count += 3
    half = 0.5
    tl.store(o_ptr + 0, big * 4 + n)
    tl.store(o_ptr + 1, seven // 2 + n)
    tl.store(o_ptr + 2, minus // 2 + n)
    tl.store(o_ptr + 3, count.to(tl.int32) + n)
    tl.store(o_ptr + 4, (half.to(tl.float32) * 4).to(tl.int32) + n)
    tl.store(o_ptr + 5, seven % 4 + n)
    tl.store(o_ptr + 6, N + n)


@triton.jit
def promotion_kernel(x_ptr, o_ptr, N: tl.constexpr):
    """bf16 times a constant is bf16; times a named number, float32."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    third = 0.3333333
    tl.store(o_ptr + i, (x * 0.3333333).to(tl.float32))
    tl.store(o_ptr + N + i, (x * third).to(tl.float32))


@triton.jit
def _pair(x, y):
    return x + y, x * y


@triton.jit
def _nested(x, y):
    both = _pair(x, y)
    return both, (x - y, 2)


@triton.jit
def tuples_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    a, b = _pair(x, 2.0)
    both, rest = _nested(a, b)
    c = both[0] + rest[0] * rest[1]
    c, b = b, c
    shapes: tl.constexpr = (N, 1)
    for j in tl.static_range(len(shapes)):
        c += shapes[j]
    tl.store(o_ptr + i, b + c * 0.5)


@triton.jit
def _apply(f: tl.constexpr, x, times: tl.constexpr = 2):
    for _ in tl.static_range(times):
        x = f(x)
    return x


@triton.jit
def _double(x):
    return x * 2


@triton.jit
def functions_kernel(x_ptr, o_ptr, F: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, _apply(F, tl.load(x_ptr + i)) + _apply(_double, tl.load(x_ptr + i), times=1))


@triton.constexpr_function
def _half(n):
    return n // 2 if n > 1 else 1


@triton.jit
def compile_time_kernel(x_ptr, o_ptr, MODE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, _half(N) * 2)
    tl.static_assert(N % 2 == 0, "N must be even")
    x = tl.load(x_ptr + i)
    if MODE == "double":
        x *= 2
    elif MODE is None:
        x *= 3
    y = x if N.value > 4 else -x
    tl.store(o_ptr + i, y)


@triton.jit
def loops_kernel(x_ptr, o_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for j in range(n, 0, -1):
        total += j.to(tl.float32)
    for j in tl.range(0, n, 2, num_stages=2):
        total += tl.load(x_ptr + j)
    for j in tl.static_range(0, 6, step=3):
        total += j
    k = n
    steps = 0
    while (k > 1) & (steps < 50):
        k = k // 2 if k % 2 == 0 else 3 * k + 1
        steps += 1
    tl.store(o_ptr + i, total + steps)


@triton.jit
def _pick(x, limit):
    if x > limit:
        y = x
    else:
        y = -x * 2
    return y


@triton.jit
def map_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i, tl.map_elementwise(_pick, x, x * 0 + 1.0))


@triton.jit
def _largest(a, i, b, j):
    take = a > b
    return tl.where(take, a, b), tl.where(take, i, j)


@triton.jit
def own_reduction_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    best, at = tl.reduce((x, i), 0, _largest)
    value, index = tl.associative_scan((x, i), 0, _largest)
    tl.store(o_ptr + i, best + at + value + index)


@triton.jit
def builtins_kernel(x_ptr, o_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = max(x, 0.5) + min(n, 3) + max(N, 4) + tl.cdiv(n, 2)
    tl.store(o_ptr + i, y + tl.minimum(x, 1.0))


@triton.jit
def lock_kernel(x_ptr, o_ptr, lock_ptr, n, N: tl.constexpr):
    """Programs add their rows to one, each behind a lock; the first finds it empty."""
    i, pid = tl.arange(0, N), tl.program_id(0)
    x = tl.load(x_ptr + pid * N + i)
    if pid >= n:
        return
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    count = tl.load(lock_ptr + 1)
    if count == 0:
        tl.atomic_xchg(lock_ptr + 1, 1)
    else:
        x += tl.load(o_ptr + i)
    tl.store(o_ptr + i, x)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def persistent_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr, FUNCTION: tl.constexpr):
    """Two programs take the blocks in turn; blocks swizzled; a function chosen by name."""
    blocks = tl.cdiv(n, BLOCK)
    tl.assume(blocks > 0)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        row, column = tl.swizzle2d(block // 2, block % 2, blocks // 2, 2, 2)
        i = (row * 2 + column) * BLOCK + tl.arange(0, BLOCK)
        i = tl.max_contiguous(tl.multiple_of(i, BLOCK), BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=0.0, eviction_policy="evict_last")
        if FUNCTION == "leaky":
            x = tl.where(x >= 0, x, 0.5 * x)
        tl.store(o_ptr + i, x, mask=i < n)


@triton.jit
def options_kernel(o_ptr, n, num_stages: tl.constexpr, num_warps: tl.constexpr):
    for i in tl.range(n, num_stages=num_stages):
        tl.store(o_ptr + i, num_warps * 10 + num_stages)


def hailstone(n):
    steps = 0
    while n > 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return steps


def bf16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


def tupled(x):
    a, b = x + 2, x * 2
    first, rest = (a + b, a * b), (a - b, 2)
    c = first[0] + rest[0] * rest[1]
    c, b = b, c
    return b + (c + N + 1) * 0.5


def best_so_far(x):
    at = np.array([np.argmax(x[: i + 1]) for i in range(len(x))])
    return x[at] + at


THIRD = np.float32(0.3333333)
W = np.random.default_rng(0).permutation(N).astype(np.float32)
CASES = {
    "bool ops": (bool_ops_kernel, (X,), {"n": 5, "N": N}, X, np.where((X > 0) & (POS % 2 == 1), X, 0) + 1),
    "bool ops, other way": (bool_ops_kernel, (X,), {"n": 2, "N": N}, X, np.where((X > 0) & (POS % 2 == 1), X, 0) + 2),
    "constants": (constants_kernel, (), {"n": 2, "N": N}, POS[:7], [2, -1, -2, 5, 4, -1, N + 2]),
    "promotion": (
        promotion_kernel, (jnp.asarray(X, jnp.bfloat16),), {"N": N}, np.zeros(2 * N, np.float32),
        np.concatenate([bf16(bf16(X) * bf16(THIRD)), bf16(X) * THIRD]),
    ),
    "tuples": (tuples_kernel, (X,), {"N": N}, X, tupled(X)),
    "functions": (functions_kernel, (X,), {"F": _double, "N": N}, X, X * 6),
    "strings": (compile_time_kernel, (X,), {"MODE": "double", "N": N}, X, X * 2),
    "None": (compile_time_kernel, (X,), {"MODE": None, "N": N}, X, X * 3),
    "loops": (loops_kernel, (X,), {"n": 7, "N": N}, X, np.full(N, 28 + X[:7:2].sum() + 3 + hailstone(7))),
    "map_elementwise": (map_kernel, (X,), {"N": N}, X, np.where(X > 1, X, -X * 2)),
    "own reductions": (own_reduction_kernel, (W,), {"N": N}, X, W.max() + W.argmax() + best_so_far(W)),
    "launch options": (options_kernel, (), {"n": 7, "num_warps": 8, "num_stages": 2}, POS[:7], [82] * 7),
    "builtins": (builtins_kernel, (X,), {"n": 5, "N": N}, X, np.maximum(X, 0.5) + 3 + N + 3 + np.minimum(X, 1)),
}  # fmt: skip


@modes
def test_locks_and_early_returns(interpret):
    rows = np.random.default_rng(1).integers(-9, 9, (6, N)).astype(np.float32)
    out = (jax.ShapeDtypeStruct((N,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32))
    got, lock = jtops.triton_call(
        rows, kernel=lock_kernel, out_type=out, grid=6, n=4, N=N, num_warps=1, zeroed_outputs=(1,), interpret=interpret
    )
    np.testing.assert_array_equal(got, rows[:4].sum(0))
    np.testing.assert_array_equal(lock, [0, 1])


@modes
def test_persistent_programs(interpret):
    x = np.linspace(-4, 4, 1000, dtype=np.float32)
    got = run(persistent_kernel, x, out=x, n=1000, BLOCK=128, FUNCTION="leaky", grid=2, interpret=interpret)
    np.testing.assert_array_equal(got, np.where(x >= 0, x, x * 0.5))


@triton.jit
def print_kernel(x_ptr, o_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    print("x is", x)
    tl.device_print("sum is", tl.sum(x).to(tl.int32) - 7, hex=True)
    tl.static_print("N is", N)
    tl.store(o_ptr + tl.arange(0, N), x)


def test_prints(capfd):
    run(print_kernel, X, N=N)
    said = capfd.readouterr().out
    assert "(0, 0, 0) x is: [-4." in said
    assert "(0, 0, 0) sum is: [0xfffffff9]" in said
    assert f"N is {N}" in said


@modes
@pytest.mark.spec("the interpreter on any host")
@pytest.mark.parametrize("case", CASES)
def test_python_in_kernels(case, interpret):
    kernel, args, constants, out, want = CASES[case]
    got = run(kernel, *args, out=out, interpret=interpret, **constants)
    np.testing.assert_allclose(got, np.asarray(want, got.dtype), rtol=1e-6, err_msg=case)


@triton.jit
def truth_kernel(x_ptr, o_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    if x > 0:
        tl.store(o_ptr + tl.arange(0, N), x)


@triton.jit
def inline_asm_kernel(x_ptr, o_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(o_ptr + tl.arange(0, N), y)


@triton.jit
def device_assert_kernel(x_ptr, o_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.device_assert(x < 3, "x must be small")
    tl.store(o_ptr + tl.arange(0, N), x)


@triton.jit
def static_assert_kernel(x_ptr, o_ptr, N: tl.constexpr):
    tl.static_assert(N == 7, "N must be seven")
    tl.store(o_ptr + tl.arange(0, N), 0.0)


@triton.jit
def second_program_kernel(x_ptr, o_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(1) * N + tl.arange(0, N))
    tl.store(o_ptr + tl.arange(0, N), x)


@pytest.mark.parametrize(
    ("kernel", "grid", "line", "said"),
    [
        (truth_kernel, 1, "if x > 0:", r"the truth of a block of shape \(32,\) is ambiguous"),
        (inline_asm_kernel, 1, "y = tl.inline_asm_elementwise", "inline assembly has no interpreter; run the kernel on a GPU"),
        (device_assert_kernel, 1, "tl.device_assert", "device_assert failed: x must be small"),
        (static_assert_kernel, 1, "tl.static_assert", "static_assert failed: N must be seven"),
        (second_program_kernel, (1, 2), "x = tl.load", "load out of bounds: 32 of 32"),
    ],
)
def test_errors_name_kernel_program_and_line(kernel, grid, line, said):
    program = r"\(0, 1, 0\)" if grid != 1 else r"\(0, 0, 0\)"
    match = rf"(?s)kernel {kernel.__name__}, program {program}, .*test_interpret_semantics\.py:\d+\n    {line}.*: {said}"
    with pytest.raises(Exception, match=match.replace("tl.", r"tl\.")):
        run(kernel, X, N=N, grid=grid)


@triton.jit
def _philox_kernel(o_ptr, u_ptr, n_ptr, seed, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.randint(seed, i).to(tl.int32, bitcast=True))
    tl.store(u_ptr + i, tl.rand(seed, i))
    tl.store(n_ptr + i, tl.randn(seed, i))


def philox(seed, i):
    """Philox4x32-10 (Salmon et al., SC 2011) of counter (i, 0, 0, 0) and a 64-bit key: its first word."""
    c, key, low = [i, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32], 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & low, (a >> 32) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return c[0]


@modes
@pytest.mark.spec("thread use (kernel call from worker thread)")
def test_eight_threads_at_once(interpret):
    """Each thread's first call of another kernel under jit, all behind one barrier."""
    names = list(CASES)[:8]
    barrier, failures = threading.Barrier(8), []

    def work(name):
        kernel, args, constants, out, want = CASES[name]
        f = jax.jit(lambda *a: jtops.triton_call(*a, kernel=kernel, out_type=out, grid=1, interpret=interpret, **constants))
        try:
            barrier.wait()
            for _ in range(3):
                got = f(*args)
                np.testing.assert_allclose(got, np.asarray(want, got.dtype), rtol=1e-6)
        except BaseException as error:
            failures.append((name, error))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


@modes
@pytest.mark.parametrize("seed", [7, 2**33 + 5])
def test_random_numbers(seed, interpret):
    n = 1024
    out = (jax.ShapeDtypeStruct((n,), jnp.int32), *[jax.ShapeDtypeStruct((n,), jnp.float32)] * 2)
    bits, uniform, normal = jtops.triton_call(kernel=_philox_kernel, out_type=out, seed=seed, N=n, grid=1, interpret=interpret)
    np.testing.assert_array_equal(np.asarray(bits).view(np.uint32)[:64], [philox(seed, i) for i in range(64)])
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.05
    assert abs(normal.mean()) < 0.15
    assert abs(normal.std() - 1) < 0.1


@pytest.mark.slow
def test_all_of_it_where_triton_makes_other_objects():
    """Case 50: with TRITON_INTERPRET set before the import, @triton.jit gives another class, and so are Triton's own helpers."""
    files = [__file__, __file__.replace("semantics", "language")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider", *files]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[2], check=False)
    assert run.returncode == 0, run.stdout[-3000:]
