"""The interpreter's answers are NumPy's: every construct of the language over every dtype it takes."""

import inspect
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jtops
from jtops._compat import triton as triton_compat
from jtops._compat.triton import tl, triton
from jtops.core.interpret import run as interpreter
from jtops.core.launch import binding
from jtops.errors import InterpreterError

SIGNED, UNSIGNED = ["int8", "int16", "int32", "int64"], ["uint8", "uint16", "uint32", "uint64"]
INTS = SIGNED + UNSIGNED
FLOATS = ["float16", "bfloat16", "float32", "float64"]
FP8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
N = 32


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def run(kernel, *args, out, grid=(1, 1, 1), **constants):
    """The kernel on NumPy arrays, without JAX around it: `out` is (shape, dtype) or a list of them."""
    outs = [np.zeros(shape, dtype_of(dtype)) for shape, dtype in (out if isinstance(out, list) else [out])]
    kernel = triton_compat.kernel_function(kernel)
    bound, arrays, _ = binding.bind(kernel, args, constants, (), outs, {})
    before = [a.copy() for a in arrays]
    interpreter.run(kernel, bound, grid, arrays, outs)
    for a, b in zip(arrays, before, strict=True):
        assert a.tobytes() == b.tobytes(), "an input was changed"
    return outs if isinstance(out, list) else outs[0]


def same(got, want):
    """Bit for bit, but any NaN for a NaN."""
    want = np.asarray(want).astype(got.dtype)
    assert got.shape == want.shape
    wide = (lambda x: x.astype(np.float64)) if got.dtype.kind not in "biu" else (lambda x: x)
    np.testing.assert_array_equal(wide(got), wide(want))


def numbers(dtype, seed=0, low=-4, high=5, shape=(N,)):
    """Small integers, which every format holds exactly."""
    low = max(low, 0) if dtype[:1] in "ub" and dtype != "bfloat16" else low
    draw = np.random.default_rng(seed).integers(low, high, shape)
    return draw.astype(dtype_of(dtype))


def on_gpu(kernel, *args, out, **constants):
    """`run`, compiled."""
    kind = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype_of(dtype))
    got = jtops.triton_call(
        *map(jnp.asarray, args),
        kernel=kernel,
        out_type=[kind(*o) for o in out] if isinstance(out, list) else kind(*out),
        grid=1,
        interpret=False,
        **constants,
    )
    return [np.asarray(o) for o in got] if isinstance(out, list) else np.asarray(got)


# -------------------------------------------------------------------------------------------------------- elementwise


@triton.jit
def binary_kernel(x_ptr, y_ptr, o_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "truediv":
        z = x / y
    elif OP == "floordiv":
        z = x // y
    elif OP == "mod":
        z = x % y
    elif OP == "minimum":
        z = tl.minimum(x, y)
    elif OP == "maximum":
        z = tl.maximum(x, y)
    elif OP == "and":
        z = x & y
    elif OP == "or":
        z = x | y
    elif OP == "xor":
        z = x ^ y
    elif OP == "shl":
        z = x << y
    elif OP == "shr":
        z = x >> y
    elif OP == "umulhi":
        z = tl.umulhi(x, y)
    elif OP == "where":
        z = tl.where(x > y, x, y)
    elif OP == "lt":
        z = x < y
    elif OP == "le":
        z = x <= y
    elif OP == "gt":
        z = x > y
    elif OP == "ge":
        z = x >= y
    elif OP == "eq":
        z = x == y
    else:
        z = x != y
    tl.store(o_ptr + i, z)


ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "where": np.maximum,
}
COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}
BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@pytest.mark.parametrize("dtype", INTS + FLOATS)
def test_arithmetic(dtype):
    """Integers wrap; floats round in their own format."""
    x, y = numbers(dtype), numbers(dtype, 1)
    if dtype in INTS:
        x[:4] = np.iinfo(dtype).max, np.iinfo(dtype).min, np.iinfo(dtype).max, np.iinfo(dtype).min
    for op, truth in ARITHMETIC.items():
        with np.errstate(over="ignore"):
            same(run(binary_kernel, x, y, out=((N,), dtype), OP=op, N=N), truth(x, y))
    for op, truth in COMPARE.items():
        same(run(binary_kernel, x, y, out=((N,), "bool"), OP=op, N=N), truth(x, y))


@pytest.mark.parametrize("dtype", INTS)
def test_integer_operations(dtype):
    """Division truncates, remainders have the dividend's sign, shifts right keep the sign of signed numbers."""
    x, y = numbers(dtype, low=-100, high=100), numbers(dtype, 1, 1, 7)
    x[:2] = np.iinfo(dtype).max, np.iinfo(dtype).min + 1
    y[y == 0] = 3
    wide = x.astype(object), y.astype(object)
    quotient = np.array([abs(a) // b * (1 if a >= 0 else -1) for a, b in zip(*wide, strict=True)])
    truths = {op: f(x, y) for op, f in BITS.items()} | {
        "floordiv": quotient,
        "mod": wide[0] - quotient * wide[1],
        "shl": np.left_shift(x, y),
        "shr": np.right_shift(x, y),
    }
    for op, truth in truths.items():
        same(run(binary_kernel, x, y, out=((N,), dtype), OP=op, N=N), truth)
    if dtype in ("int32", "uint32", "int64", "uint64"):
        bits, unsigned = 8 * x.itemsize, [[int(v) % 2 ** (8 * x.itemsize) for v in a] for a in wide]
        high = np.array([a * b >> bits for a, b in zip(*unsigned, strict=True)], np.uint64).astype(f"u{x.itemsize}").view(x.dtype)
        same(run(binary_kernel, x, y, out=((N,), dtype), OP="umulhi", N=N), high)


@pytest.mark.parametrize("dtype", FLOATS)
def test_division_of_floats(dtype):
    x, y = numbers(dtype), numbers(dtype, 1, 1, 5)
    wide = (lambda a: a) if dtype == "float64" else (lambda a: a.astype(np.float32))
    same(run(binary_kernel, x, y, out=((N,), dtype), OP="truediv", N=N), (wide(x) / wide(y)).astype(x.dtype))
    same(run(binary_kernel, x, y, out=((N,), dtype), OP="mod", N=N), np.fmod(wide(x), wide(y)).astype(x.dtype))


def test_bool():
    x, y = (np.random.default_rng(k).integers(0, 2, N).astype(bool) for k in (0, 1))
    for op, truth in {**BITS, "ne": np.not_equal, "eq": np.equal}.items():
        same(run(binary_kernel, x, y, out=((N,), "bool"), OP=op, N=N), truth(x, y))


@triton.jit
def unary_kernel(x_ptr, o_ptr, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if OP == "neg":
        y = -x
    elif OP == "not":
        y = ~x
    elif OP == "abs":
        y = tl.abs(x)
    elif OP == "exp":
        y = tl.exp(x)
    elif OP == "exp2":
        y = tl.exp2(x)
    elif OP == "log":
        y = tl.log(x)
    elif OP == "log2":
        y = tl.log2(x)
    elif OP == "sin":
        y = tl.sin(x)
    elif OP == "cos":
        y = tl.cos(x)
    elif OP == "sqrt":
        y = tl.sqrt(x)
    elif OP == "sqrt_rn":
        y = tl.sqrt_rn(x)
    elif OP == "rsqrt":
        y = tl.rsqrt(x)
    elif OP == "floor":
        y = tl.floor(x)
    elif OP == "ceil":
        y = tl.ceil(x)
    elif OP == "erf":
        y = tl.erf(x)
    elif OP == "sigmoid":
        y = tl.sigmoid(x)
    elif OP == "fma":
        y = tl.fma(x, x, x)
    else:
        y = tl.clamp(x, -1.0, 1.0)
    tl.store(o_ptr + i, y)


@pytest.mark.parametrize("dtype", INTS + FLOATS + FP8)
def test_signs(dtype):
    x = numbers(dtype)
    if dtype in INTS:
        same(run(unary_kernel, x, out=((N,), dtype), OP="not", N=N), ~x)
    if dtype not in FP8:
        same(run(unary_kernel, x, out=((N,), dtype), OP="neg", N=N), -x if dtype not in UNSIGNED else 0 - x)
    same(run(unary_kernel, x, out=((N,), dtype), OP="abs", N=N), np.abs(x))


erf = np.vectorize(math.erf)
MATHS = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sin": np.sin, "cos": np.cos, "sqrt": np.sqrt,
    "sqrt_rn": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "floor": np.floor, "ceil": np.ceil, "erf": erf,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "fma": lambda x: x * x + x, "clamp": lambda x: np.clip(x, -1, 1),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_maths(dtype):
    x = np.linspace(0.1, 3, N).astype(dtype)
    for op, truth in MATHS.items():
        if dtype == "float64" and op == "sqrt_rn":
            continue
        got = run(unary_kernel, x, out=((N,), dtype), OP=op, N=N)
        np.testing.assert_allclose(
            got, truth(x.astype(np.float64)), rtol=4 * np.finfo(dtype).eps, atol=1e-7 if dtype == "float32" else 1e-15, err_msg=op
        )


@triton.jit
def cast_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.load(x_ptr + i).to(o_ptr.dtype.element_ty))


@triton.jit
def implicit_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.load(x_ptr + i))


@triton.jit
def bits_kernel(x_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.load(x_ptr + i).to(o_ptr.dtype.element_ty, bitcast=True))


ALL = ["bool", *INTS, *FLOATS, *FP8]


@pytest.mark.spec("the interpreter on any host")
@pytest.mark.parametrize("source", ALL)
def test_casts(source):
    """Every pair of formats that Triton casts between, of numbers both hold."""
    x = numbers(source, low=-2, high=2)
    for to in ALL:
        if (source in FP8 and to in ("bool", *INTS)) or (to in FP8 and source in ("bool", *INTS)):
            continue  # Triton has no such casts
        want = (
            x.astype(np.float64).astype(dtype_of(to))
            if to in FP8
            else x.astype(np.float64).astype("int64" if to in INTS else dtype_of(to)).astype(dtype_of(to))
        )
        same(run(cast_kernel, x, out=((N,), to), N=N), want)
        same(run(implicit_kernel, x, out=((N,), to), N=N), want)


@pytest.mark.parametrize(
    ("source", "to"),
    [("float16", f) for f in FP8] + [("bfloat16", f) for f in FP8] + [("float16", "bfloat16"), ("bfloat16", "float16")],
)
def test_rounding_of_every_pattern(source, to):
    """Case 50: all 65536 patterns, NaN and infinities among them, round to nearest even as ml_dtypes does."""
    x = np.arange(65536, dtype=np.uint16).view(dtype_of(source))
    with np.errstate(invalid="ignore", over="ignore"):
        want = x.astype(np.float32).astype(dtype_of(to))
    same(run(cast_kernel, x, out=(x.shape, to), N=65536), want)


@pytest.mark.parametrize("dtype", [*INTS, *FLOATS, *FP8])
def test_bitcasts(dtype):
    x = numbers(dtype)
    for to in (
        f"int{8 * x.itemsize}",
        f"uint{8 * x.itemsize}",
        *(f for f in (*FLOATS, *FP8) if dtype_of(f).itemsize == x.itemsize),
    ):
        got = run(bits_kernel, x, out=((N,), to), N=N)
        assert got.tobytes() == x.tobytes()


# --------------------------------------------------------------------------------------------------------- memory


@triton.jit
def masked_kernel(x_ptr, o_ptr, n, OTHER: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n, other=OTHER))


@triton.jit
def unmasked_other_kernel(x_ptr, o_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n))
    tl.store(o_ptr + i, tl.load(x_ptr + 1), mask=i >= n)


@pytest.mark.parametrize("dtype", ALL)
def test_masks(dtype):
    x = numbers(dtype, high=2)
    want = np.where(np.arange(N) < 20, x, np.ones((), x.dtype)) if dtype != "bool" else np.where(np.arange(N) < 20, x, True)
    if dtype not in FP8:
        same(run(masked_kernel, x, out=((N,), dtype), n=20, OTHER=1, N=N), want)
    same(run(unmasked_other_kernel, x, out=((N,), dtype), n=20, N=N), np.where(np.arange(N) < 20, x, x[1]))


@triton.jit
def atomic_kernel(x_ptr, o_ptr, old_ptr, start, OP: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """M cells, each met by N / M lanes of one instruction."""
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i % M, (i * 0 + start).to(x.dtype))
    at = o_ptr + i % M
    if OP == "add":
        old = tl.atomic_add(at, x, mask=i < N - M)
    elif OP == "max":
        old = tl.atomic_max(at, x, mask=i < N - M)
    elif OP == "min":
        old = tl.atomic_min(at, x, mask=i < N - M)
    elif OP == "and":
        old = tl.atomic_and(at, x, mask=i < N - M)
    elif OP == "or":
        old = tl.atomic_or(at, x, mask=i < N - M)
    elif OP == "xor":
        old = tl.atomic_xor(at, x, mask=i < N - M)
    else:
        old = tl.atomic_xchg(at, x, mask=i < N - M)
    tl.store(old_ptr + i, old, mask=i < N - M)


ATOMICS = {
    "add": (np.add, ["int32", "uint32", "int64", "uint64", *FLOATS]),
    "max": (np.maximum, ["int32", "uint32", "int64", "uint64", "float32", "float64"]),
    "min": (np.minimum, ["int32", "uint32", "int64", "uint64", "float32", "float64"]),
    "and": (np.bitwise_and, ["int32", "uint32", "int64", "uint64"]),
    "or": (np.bitwise_or, ["int32", "uint32", "int64", "uint64"]),
    "xor": (np.bitwise_xor, ["int32", "uint32", "int64", "uint64"]),
    "xchg": (lambda a, b: b, ["int32", "uint32", "int64", "uint64", "float32", "float64"]),
}


@pytest.mark.parametrize(("op", "dtype"), [(op, d) for op, (_, dtypes) in ATOMICS.items() for d in dtypes])
def test_atomics(op, dtype):
    """Lanes that meet in one cell all count, and each returns what it found."""
    truth, m = ATOMICS[op][0], 4
    x, cells = numbers(dtype), np.full(m, 1).astype(dtype_of(dtype))
    old = np.zeros(N - m, x.dtype)
    for i in range(N - m):
        old[i] = cells[i % m]
        cells[i % m] = truth(cells[i % m], x[i])
    got, seen = run(atomic_kernel, x, out=[((m,), dtype), ((N - m,), dtype)], start=1, OP=op, N=N, M=m)
    same(got, cells)
    if x.dtype.kind in "iu" or op not in ("max", "min"):  # these are two instructions on the bits of a float
        same(seen, old)


@triton.jit
def cas_kernel(x_ptr, o_ptr, old_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i, x)
    tl.store(old_ptr + i, tl.atomic_cas(o_ptr + i, x * 0 + 1, x * 0 + 7))
    tl.atomic_cas(o_ptr, tl.load(o_ptr), tl.load(o_ptr + 1), sem="relaxed", scope="gpu")


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "int16"])
def test_compare_and_swap(dtype):
    x = numbers(dtype)
    want = np.where(x == 1, np.full_like(x, 7), x)
    want[0] = want[1]
    got, old = run(cas_kernel, x, out=[((N,), dtype)] * 2, N=N)
    same(got, want)
    same(old, x)


@triton.jit
def block_pointer_kernel(x_ptr, o_ptr, M: tl.constexpr, N: tl.constexpr, PAD: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, shape=(M, N), strides=(N, 1), offsets=(0, 0), block_shape=(4, 8), order=(1, 0))
    o = tl.make_block_ptr(o_ptr, shape=(8, 8), strides=(8, 1), offsets=(0, 0), block_shape=(4, 8), order=(1, 0))
    for _ in range(2):
        tl.store(o, tl.load(x, boundary_check=(0, 1), padding_option=PAD))
        x, o = tl.advance(x, (4, 0)), tl.advance(o, (4, 0))


@triton.jit
def descriptor_kernel(x_ptr, o_ptr, M, N: tl.constexpr, B: tl.constexpr, PAD: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[4, B], padding_option=PAD)
    o = tl.make_tensor_descriptor(o_ptr, shape=[8, N], strides=[N, 1], block_shape=[4, B])
    for i in range(0, 8, 4):
        for j in range(0, N, B):
            o.store([i, j], x.load([i, j]))


PADS = [(d, "zero") for d in (*INTS, *FLOATS, *FP8)] + [(d, "nan") for d in (*FLOATS, *FP8)]


def padded(x, rows, pad):
    want = np.full((rows, x.shape[1]), 0 if pad == "zero" else np.nan, np.float64).astype(x.dtype)
    want[: len(x)] = x
    return want


@pytest.mark.parametrize(("dtype", "pad"), PADS)
def test_block_pointers(dtype, pad):
    x = numbers(dtype, shape=(5, 8))
    if "have been removed" in inspect.getsource(tl.make_block_ptr):  # Triton 3.9
        with pytest.raises(InterpreterError, match="removed in favor of the tensor descriptor"):
            run(block_pointer_kernel, x, out=((8, 8), dtype), M=5, N=8, PAD=pad)
    else:
        same(run(block_pointer_kernel, x, out=((8, 8), dtype), M=5, N=8, PAD=pad), padded(x, 8, pad))


@pytest.mark.parametrize(("dtype", "pad"), PADS)
def test_descriptors(dtype, pad):
    block = max(16 // dtype_of(dtype).itemsize, 4)
    x = numbers(dtype, shape=(5, 2 * block))
    same(run(descriptor_kernel, x, out=((8, 2 * block), dtype), M=5, N=2 * block, B=block, PAD=pad), padded(x, 8, pad))


@triton.jit
def descriptor_reduce_kernel(x_ptr, o_ptr, N: tl.constexpr):
    tl.store(o_ptr + tl.arange(0, 4)[:, None] * N + tl.arange(0, N)[None, :], tl.zeros((4, N), x_ptr.dtype.element_ty))
    x = tl.make_tensor_descriptor(x_ptr, shape=[4, N], strides=[N, 1], block_shape=[4, N])
    o = tl.make_tensor_descriptor(o_ptr, shape=[3, N], strides=[N, 1], block_shape=[4, N])
    o.atomic_add([0, 0], x.load([0, 0]))
    o.atomic_add([1, 0], x.load([0, 0]))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "uint64", "float32", "float16", "bfloat16"])
def test_descriptor_atomics(dtype):
    x = numbers(dtype, shape=(4, 16))
    want = np.zeros_like(x)
    want[:3] += x[:3]
    want[1:3] += x[:2]
    same(run(descriptor_reduce_kernel, x, out=((4, 16), dtype), N=16), want)


@triton.jit
def descriptor_gather_kernel(x_ptr, at_ptr, o_ptr, s_ptr, N: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[16, N], strides=[N, 1], block_shape=[1, N])
    s = tl.make_tensor_descriptor(s_ptr, shape=[16, N], strides=[N, 1], block_shape=[1, N])
    at = tl.load(at_ptr + tl.arange(0, 8))
    rows = x.gather(at, 0)
    tl.store(o_ptr + tl.arange(0, 8)[:, None] * N + tl.arange(0, N)[None, :], rows)
    tl.store(s_ptr + tl.arange(0, 16)[:, None] * N + tl.arange(0, N)[None, :], tl.zeros((16, N), x_ptr.dtype.element_ty))
    s.scatter(rows, at, 0)


@pytest.mark.parametrize("dtype", ["int32", "float32", "float16", "bfloat16"])
def test_descriptor_gather(dtype):
    x, at = numbers(dtype, shape=(16, 16)), np.array([3, 0, 15, 7, 8, 9, 1, 2], np.int32)
    rows, scattered = run(descriptor_gather_kernel, x, at, out=[((8, 16), dtype), ((16, 16), dtype)], N=16)
    same(rows, x[at])
    want = np.zeros_like(x)
    want[at] = x[at]
    same(scattered, want)


# --------------------------------------------------------------------------------------- products, reductions, shapes


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, o_ptr, PRECISION: tl.constexpr, ACC: tl.constexpr, OUT: tl.constexpr):
    m = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    n = tl.arange(0, 32)[:, None] * 16 + tl.arange(0, 16)[None, :]
    o = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + m), tl.load(b_ptr + n)
    if ACC:
        y = tl.dot(a, b, tl.load(c_ptr + o), input_precision=PRECISION, out_dtype=OUT)
    else:
        y = tl.dot(a, b, input_precision=PRECISION, out_dtype=OUT)
    tl.store(o_ptr + o, y)


DOTS = [(d, "float32", tl.float32) for d in ["float16", "bfloat16", "float32", *FP8]] + [
    ("int8", "int32", tl.int32), ("float64", "float64", tl.float64), ("float16", "float16", tl.float16),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "out", "out_dtype"), DOTS)
def test_dot(dtype, out, out_dtype):
    a, b, c = numbers(dtype, 0, -2, 3, (16, 32)), numbers(dtype, 1, -2, 3, (32, 16)), numbers(out, 2, shape=(16, 16))
    product = a.astype(np.float64) @ b.astype(np.float64)
    precisions = ["tf32", "tf32x3", "ieee"] if dtype == "float32" else [None]
    for precision in precisions:
        for acc in (True, False):
            got = run(dot_kernel, a, b, c, out=((16, 16), out), PRECISION=precision, ACC=acc, OUT=out_dtype)
            same(got, product + acc * c)


@triton.jit
def scaled_kernel(a_ptr, as_ptr, b_ptr, bs_ptr, o_ptr, A: tl.constexpr, B: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr):
    m, g = tl.arange(0, 16)[:, None], tl.arange(0, 2)[None, :]
    a = tl.load(a_ptr + m * KA + tl.arange(0, KA)[None, :])
    b = tl.load(b_ptr + tl.arange(0, KB)[:, None] * 16 + tl.arange(0, 16)[None, :])
    y = tl.dot_scaled(a, tl.load(as_ptr + m * 2 + g), A, b, tl.load(bs_ptr + m * 2 + g), B)
    tl.store(o_ptr + m * 16 + tl.arange(0, 16)[None, :], y)


def mx(kind, shape, axis, seed):
    """Random bits of a microscaling format, packed along `axis`; the float32 values they stand for."""
    rng = np.random.default_rng(seed)
    if kind != "e2m1":
        x = rng.integers(-8, 8, shape).astype(dtype_of({"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[kind]))
        return x.view(np.uint8), x.astype(np.float32)
    codes = rng.integers(0, 16, shape).astype(np.uint8)
    low, high = (np.take(codes, range(k, shape[axis], 2), axis) for k in (0, 1))
    return low | high << 4, codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


@pytest.mark.parametrize(("left", "right"), [("e4m3", "e5m2"), ("e2m1", "e2m1"), ("e4m3", "e2m1")])
def test_dot_scaled(left, right):
    """Values of groups of 32 along the summed axis share a power of two."""
    (a, a_values), (b, b_values) = mx(left, (16, 64), 1, 0), mx(right, (64, 16), 0, 1)
    exponents = [np.random.default_rng(k).integers(124, 131, (16, 2)).astype(np.uint8) for k in (2, 3)]
    powers = [np.repeat(e.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32, 1) for e in exponents]
    got = run(
        scaled_kernel, a, exponents[0], b, exponents[1], out=((16, 16), "float32"), A=left, B=right, KA=a.shape[1], KB=b.shape[0]
    )
    same(got, (a_values * powers[0]) @ (b_values * powers[1].T))


@triton.jit
def reduce_kernel(
    x_ptr, o_ptr, OP: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, L: tl.constexpr
):
    x = tl.load(x_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    if OP == "sum":
        y = tl.sum(x, AXIS, keep_dims=KEEP)
    elif OP == "max":
        y = tl.max(x, AXIS, keep_dims=KEEP)
    elif OP == "min":
        y = tl.min(x, AXIS, keep_dims=KEEP)
    elif OP == "argmax":
        y = tl.argmax(x, AXIS, keep_dims=KEEP)
    elif OP == "argmin":
        y = tl.argmin(x, AXIS, keep_dims=KEEP)
    elif OP == "xor_sum":
        y = tl.xor_sum(x, AXIS, keep_dims=KEEP)
    else:
        y = tl.reduce_or(x, AXIS, keep_dims=KEEP)
    if L == 1:
        tl.store(o_ptr, tl.max(y) if KEEP else y)
    else:
        tl.store(o_ptr + tl.arange(0, L), y.reshape(L))


REDUCE = {
    "sum": np.sum, "max": np.max, "min": np.min, "argmax": np.argmax, "argmin": np.argmin,
    "xor_sum": np.bitwise_xor.reduce, "reduce_or": np.bitwise_or.reduce,
}  # fmt: skip


SOME = ["int32", "uint8", "bfloat16", "float32"]


@pytest.mark.parametrize(("dtype", "axis"), [(d, 1) for d in INTS + FLOATS] + [(d, axis) for d in SOME for axis in (0, None)])
def test_reductions(dtype, axis):
    x = numbers(dtype, shape=(4, 8))
    for op, truth in REDUCE.items():
        if (op in ("xor_sum", "reduce_or") and dtype not in INTS) or (op.startswith("arg") and axis is None):
            continue
        want = np.asarray(truth(x.reshape(-1) if axis is None else x, axis=axis or 0)).reshape(-1)
        out = "int32" if op.startswith("arg") else dtype
        for keep in (False, True):
            got = run(reduce_kernel, x, out=((want.size,), out), OP=op, AXIS=axis, KEEP=keep, M=4, N=8, L=want.size)
            same(got, want)


@triton.jit
def scan_kernel(x_ptr, o_ptr, OP: tl.constexpr, AXIS: tl.constexpr, FLAG: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + i)
    if OP == "cumsum":
        y = tl.cumsum(x, AXIS, reverse=FLAG)
    elif OP == "cumprod":
        y = tl.cumprod(x, AXIS, reverse=FLAG)
    elif OP == "sort":
        y = tl.sort(x, AXIS, descending=FLAG)
    else:
        y = tl.flip(x, AXIS)
    tl.store(o_ptr + i, y)


@pytest.mark.parametrize(("dtype", "flag"), [(d, False) for d in INTS + FLOATS] + [(d, True) for d in SOME])
def test_scans_and_sorts(dtype, flag):
    x = numbers(dtype, low=1, high=3, shape=(4, 8))
    turn = lambda a, axis: np.flip(a, axis) if flag else a
    for axis in (0, 1):
        kept = {"dtype": x.dtype}
        wide = {"dtype": np.float64} if dtype not in INTS else kept
        same(
            run(scan_kernel, x, out=(x.shape, dtype), OP="cumsum", AXIS=axis, FLAG=flag, M=4, N=8),
            turn(np.cumsum(turn(x, axis), axis, **wide), axis),
        )
        same(
            run(scan_kernel, x, out=(x.shape, dtype), OP="cumprod", AXIS=axis, FLAG=flag, M=4, N=8),
            turn(np.cumprod(turn(x, axis), axis, **wide), axis),
        )
        same(run(scan_kernel, x, out=(x.shape, dtype), OP="flip", AXIS=axis, FLAG=flag, M=4, N=8), np.flip(x, axis))
    x = numbers(dtype, low=-50, high=50, shape=(4, 8))
    same(run(scan_kernel, x, out=(x.shape, dtype), OP="sort", AXIS=1, FLAG=flag, M=4, N=8), turn(np.sort(x, 1), 1))


@triton.jit
def shapes_kernel(x_ptr, y_ptr, o_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    both = tl.join(x, y)
    a, b = tl.split(both)
    tl.store(o_ptr + i, a)
    tl.store(o_ptr + N + i, b)
    two = tl.arange(0, 2 * N)
    tl.store(o_ptr + 2 * N + two, tl.interleave(x, y))
    tl.store(o_ptr + 4 * N + two, tl.cat(x, y, can_reorder=True))
    grid = tl.reshape(x, (4, N // 4))
    tl.store(o_ptr + 6 * N + i, tl.permute(grid, (1, 0)).reshape(N))
    tl.store(o_ptr + 7 * N + i, tl.ravel(tl.trans(grid.expand_dims(0), 2, 0, 1)))
    tl.store(o_ptr + 8 * N + i, tl.broadcast_to(y.reshape(2, N // 2).T.reshape(N), (N,)))
    tl.store(o_ptr + 9 * N + i, tl.gather(x, N - 1 - i, 0))
    tl.store(o_ptr + 10 * N + i, x[None, :].broadcast_to(1, N).reshape(N))
    tl.store(o_ptr + 11 * N + i, tl.full((N,), 1, tl.float32).to(x.dtype))
    tl.store(o_ptr + 12 * N + i, tl.zeros_like(x))


@pytest.mark.filterwarnings("ignore:tl.cat")  # its one form in Triton 3.6 is deprecated in 3.9
@pytest.mark.parametrize("dtype", [*INTS, *FLOATS, *FP8])
def test_shapes(dtype):
    x, y = numbers(dtype), numbers(dtype, 1)
    want = [
        x,
        y,
        np.stack([x, y], 1).reshape(-1),
        x,
        y,
        x.reshape(4, -1).T.reshape(-1),
        x.reshape(4, -1).T.reshape(-1),
        y.reshape(2, -1).T.reshape(-1),
        x[::-1],
        x,
        np.ones_like(x),
        np.zeros_like(x),
    ]
    same(run(shapes_kernel, x, y, out=((13 * N,), dtype), N=N), np.concatenate(want))


@triton.jit
def histogram_kernel(x_ptr, o_ptr, m_ptr, k_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + tl.arange(0, 8), tl.histogram(x, 8))
    tl.store(m_ptr + tl.arange(0, 8), tl.histogram(x, 8, mask=i < 20))
    tl.store(k_ptr + tl.arange(0, 4), tl.topk(x, 4))


@pytest.mark.parametrize("dtype", ["int32", "uint32"])
def test_histogram_and_topk(dtype):
    x = numbers(dtype, low=0, high=8)
    whole, masked, top = run(histogram_kernel, x, out=[((8,), "int32")] * 2 + [((4,), dtype)], N=N)
    same(whole, np.bincount(x.astype(int), minlength=8))
    same(masked, np.bincount(x[:20].astype(int), minlength=8))
    same(top, np.sort(x)[::-1][:4])


# ----------------------------------------------------------------------------------------- and the GPU's are the same


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32"])
def test_the_gpu_agrees(dtype):
    """A sample of the above, compiled: case 50."""
    x, y = numbers(dtype), numbers(dtype, 1, 1, 5)
    calls = [(binary_kernel, (x, y), ((N,), dtype), {"OP": op, "N": N}) for op in ("mul", "sub", "mod", "minimum")]
    calls += [(binary_kernel, (x, y), ((N,), "bool"), {"OP": "lt", "N": N})]
    calls += [(unary_kernel, (x,), ((N,), dtype), {"OP": "neg", "N": N})]
    calls += [(cast_kernel, (x,), ((N,), to), {"N": N}) for to in ("float32", "int16")]
    m = x.reshape(4, 8)
    shape = {"M": 4, "N": 8}
    calls += [(reduce_kernel, (m,), ((4,), "int32"), {"OP": "argmax", "AXIS": 1, "KEEP": False, "L": 4, **shape})]
    calls += [(reduce_kernel, (m,), ((8,), dtype), {"OP": "sum", "AXIS": 0, "KEEP": True, "L": 8, **shape})]
    calls += [(scan_kernel, (m,), (m.shape, dtype), {"OP": op, "AXIS": 1, "FLAG": True, **shape}) for op in ("cumsum", "sort")]
    for kernel, args, out, constants in calls:
        same(on_gpu(kernel, *args, out=out, **constants), run(kernel, *args, out=out, **constants))


@pytest.mark.gpu
@pytest.mark.parametrize(("to", "largest"), [("float8_e5m2", 57344), ("float8_e4m3fn", 448)])
def test_the_gpu_rounds_as_ml_dtypes(to, largest):
    """Every float16 that the format has room for, to nearest even; beyond, GPUs differ."""
    x = np.arange(65536, dtype=np.uint16).view(np.float16)
    x = np.where(np.abs(x) <= largest, x, np.float16(0))
    same(on_gpu(cast_kernel, x, out=(x.shape, to), N=65536), x.astype(dtype_of(to)))
