"""Cases 61, 62: sizes at the edge of 32 bits, by walks over single programs; and all of them compile."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jtops
from jtops.errors import InterpreterError
from tests import walk
from tests.kernels import lowered
from tests.kernels.test_row_lowering import struct, with_gradients

EDGE, OVER, WIDE = 2**31 - 100, 2**31 + 7, 2**32 + 2**20
# Of long rows some parts at once, the others where time is no matter.
SIZES = [EDGE, pytest.param(OVER, marks=pytest.mark.slow), pytest.param(WIDE, marks=pytest.mark.slow)]
interpreted = {"implementation": "interpret"}
logsumexp = lambda x, **kw: jtops.logsumexp(x, None, **kw)
softmax = lambda x, **kw: jtops.softmax(x, None, **kw)


def mapped(f, axes):
    return lambda *operands, **kw: jax.vmap(functools.partial(f, **kw), axes)(*operands)


def spans(touched) -> dict:
    """By parameter the first element, the last, and how many."""
    return {name: (t.first, t.last, t.count) for name, t in touched.items() if t.count}


def alone(launch, program) -> tuple[dict, dict]:
    memory = launch.walk(program)
    return spans(memory.loaded), spans(memory.stored)


def test_a_walk_finds_what_it_is_for():
    """Off the end is an error, and what is met is counted: without this, no other test here could fail."""
    f = lambda x: jtops.softmax(x, config=jtops.Config(BLOCK_M=1, BLOCK_N=64, PROGRAMS=4), **interpreted)
    whole, *_ = walk.launches(f, struct(3, 60))
    assert whole.grid == (3, 1, 1)
    assert alone(whole, -1) == ({"x_ptr": (120, 179, 60)}, {"y_ptr": (120, 179, 60)})
    shorter = walk.Walked(whole.kernel, whole.bound, whole.grid, (struct(170),), whole.outputs)
    with pytest.raises(InterpreterError, match="load out of bounds: 10 of 60 addresses lie in no buffer, the first 170"):
        shorter.walk(0, -1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    "f", [pytest.param(logsumexp, id="logsumexp", marks=pytest.mark.slow), pytest.param(softmax, id="softmax")]
)
def test_case_61_softmax_of_one_row(f, n):
    """The last part takes what is left of the row, and each part before it as much as the first."""
    for launch in walk.launches(with_gradients(lambda x: f(x, **interpreted)), struct(n)):
        programs = launch.grid[0]
        size = -(-(-(-n // 8) * 8) // programs)  # about what each has
        loaded, stored = alone(launch, -1)
        for name in {"x_ptr", "a_ptr"} & loaded.keys():
            first, last, count = loaded[name]
            assert last == n - 1
            assert first + count == n  # each element once
            assert abs(first - (programs - 1) * size) < programs * 8192
        for name in {"y_ptr", "dx_ptr"} & stored.keys():
            if stored[name] != (0, 0, 1):
                assert stored[name] == loaded.get("x_ptr", loaded.get("a_ptr"))


@pytest.mark.parametrize("n", SIZES)
def test_case_61_norms_of_one_row(n):
    f = with_gradients(lambda x, *p: jtops.layer_norm(x, *p, **interpreted))
    seen = set()
    for launch in walk.launches(f, struct(1, n), struct(n), struct(n)):
        loaded, stored = alone(launch, -1 if launch.name != "_dx_kernel" else 0)  # which goes backwards
        for name in {"norm.x", "norm.scale", "norm.bias", "given.x", "given.g", "given.scale"} & loaded.keys():
            first, last, count = loaded[name]
            assert (last, first + count) == (n - 1, n), (launch.name, name)
        for name in {"y_ptr", "dx_ptr", "dscale_ptr", "dbias_ptr"} & stored.keys():
            first, last, count = stored[name]
            assert (last, first + count) == (n - 1, n), (launch.name, name)
        seen.add(launch.name)
    assert seen == {"_long_forward_kernel", "_sums_kernel", "_dx_kernel"}


@pytest.mark.slow
def test_case_61_a_mask_of_one_row():
    """Nothing takes part, in a memory of zeros; the mask is read to its end, and the result written to its own."""
    f = lambda x, where: jtops.softmax(x, where=where, **interpreted)
    find, apply = walk.launches(f, struct(2, OVER), struct(OVER, dtype="bool"))
    loaded, _ = alone(find, -1)
    first, last, count = loaded["where_ptr"]
    assert (last, first + count) == (OVER - 1, OVER)
    _, stored = alone(apply, -1)
    assert stored["y_ptr"] == (OVER + first, 2 * OVER - 1, count)


ADDED = {
    "same": (struct(32, 65536, 1024),) * 2,
    "edge": (struct(EDGE),) * 2,
    "past": (struct(5_000_000, 1024),) * 2,
    "row": (struct(2_500_000, 1024), struct(1024)),
    "long_row": (struct(2, OVER), struct(OVER)),
    "column": (struct(2, OVER), struct(2, 1)),
    "many_rows": (struct(OVER, 3), struct(3)),
    "many_matrices": (struct(OVER, 2, 3), struct(2, 3)),
}


@pytest.mark.parametrize("name", ADDED)
def test_case_62_add(name):
    operands = ADDED[name]
    launch, *_ = walk.launches(lambda x, y: jtops.add(x, y, **interpreted), *operands)
    loaded, stored = alone(launch, -1)
    first, last, count = stored["out_ptr"]
    assert (last, first + count) == (operands[0].size - 1, operands[0].size)
    assert loaded["x_ptr"] == (first, last, count)
    assert loaded["y_ptr"][1] == operands[1].size - 1
    assert alone(launch, 0)[1]["out_ptr"][0] == 0


ROWS = {  # more than 2^31 of them, or columns
    "softmax": (jtops.log_softmax, (struct(OVER, 4),)),
    "masked": (lambda x, **kw: jtops.softmax(x, where=jnp.ones(4, bool), **kw), (struct(OVER, 4),)),
    "columns": (lambda x, **kw: jtops.softmax(x, 0, **kw), (struct(2, 2_200_000_000),)),
    "columns_at_the_edge": (lambda x, **kw: jtops.softmax(x, 0, **kw), (struct(2, EDGE),)),
    "rms_norm": (jtops.rms_norm, (struct(OVER, 4), struct(4))),
    "scales": (mapped(jtops.rms_norm, (0, 0)), (struct(2, OVER, 4), struct(2, 4))),
    "residual": (
        mapped(lambda *a, **kw: jtops.add_rms_norm(*a, **kw)[0], (0, None, None)),
        (struct(2, OVER, 4), struct(OVER, 4), struct(4)),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_case_62_many_rows(name):
    f, operands = ROWS[name]
    launch, *_ = walk.launches(lambda *a: f(*a, **interpreted), *operands)
    for program in (0, -1):
        loaded, stored = alone(launch, program)
        first, last, count = stored["y_ptr"]
        assert count > 0
        assert first == 0 if program == 0 else last == operands[0].size - 1
        for operand in ("x_ptr", "norm.x"):
            if operand in loaded:
                assert loaded[operand] == (first, last, count)


@pytest.mark.parametrize(
    ("f", "operands"),
    [
        *((jtops.add, operands) for operands in ADDED.values()),
        *ROWS.values(),
        *((f, (struct(n),)) for f in (logsumexp, softmax) for n in (EDGE, OVER, WIDE)),
        *((jtops.layer_norm, (struct(1, n), struct(n), struct(n))) for n in (EDGE, OVER, WIDE)),
    ],
)
def test_they_compile(f, operands):
    """Numbers past 2^31 are unsigned at first, which no operator mixes with what is signed."""
    both = with_gradients(f) if len(operands[0].shape) < 3 else f  # sums over more groups than a grid has are refused
    assert lowered.kernels(both, *operands)
