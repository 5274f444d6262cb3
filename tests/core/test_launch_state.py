"""What a launch is known by and keeps: the interpreter's key, numbers in PTX, failed compilations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.triton import tl, triton
from jtops.core import cache
from jtops.core.launch import ptx
from jtops.core.types import Scalar

X = jnp.arange(8.0)
OUT = jax.ShapeDtypeStruct((8,), jnp.float32)


@triton.jit
def copy_kernel(x_ptr, o_ptr):
    i = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(o_ptr + i, tl.load(x_ptr + i))


def copied(x, grid, **options):
    return jtops.triton_call(x, kernel=copy_kernel, out_type=OUT, grid=grid, interpret=True, **options)


def test_calls_that_differ_in_their_grid():
    """In one program and in two of which the first runs last."""
    one, two = jax.jit(lambda x: (copied(x, 1), copied(x, 2)))(X)
    assert (np.isnan(one).sum(), np.isnan(two).sum()) == (4, 0)
    shapes = [jax.jit(lambda x, grid=grid: copied(x, grid)).lower(X).compile() for grid in (1, 2, (1, 2))]
    assert [int(np.isnan(f(X)).sum()) for f in shapes] == [4, 0, 4]


def test_calls_that_differ_in_what_is_zeroed():
    compiled = lambda **options: jax.jit(lambda x: copied(x, 1, **options)).lower(X).compile()
    zeroed, plain = compiled(zeroed_outputs=[0]), compiled()
    np.testing.assert_array_equal(zeroed(X)[4:], 0)
    assert np.isnan(plain(X)[4:]).all()


ENTRY = """.version 8.0
.target sm_90a
.visible .entry kernel(
	.param .u64 kernel_param_0,
	.param .{declared} kernel_param_1
)
{{
	.reg .b16 	%rs<2>;
	.reg .b32 	%r<3>;
	.reg .b64 	%rd<3>;
	ld.param.u64 	%rd1, [kernel_param_0];
	ld.param.{kind} 	%{register}1, [kernel_param_1];
	ret;
}}
"""


@pytest.mark.parametrize(
    ("type_", "value", "kind", "register", "bits"),
    [
        ("i8", -3, "s8", "rs", 0xFFFD),
        ("i8", -3, "u8", "rs", 0x00FD),
        ("i8", 3, "s8", "rs", 0x0003),
        ("i16", -2, "s16", "r", 0xFFFFFFFE),
        ("i32", -1, "s32", "rd", 0xFFFFFFFFFFFFFFFF),
        ("i32", -1, "u32", "rd", 0x00000000FFFFFFFF),
        ("i32", -5, "b32", "r", 0xFFFFFFFB),
        ("i64", -(2**40), "b64", "rd", 2**64 - 2**40),
    ],
)
def test_numbers_in_registers_wider_than_they_are(type_, value, kind, register, bits):
    """PTX ISA, "Operand size exceeding instruction-type size": a load extends by the sign of its own type, as a move has to."""
    text = ENTRY.format(declared=f"u{kind[1:]}", kind=kind, register=register)
    got = ptx._with_constants(text, [None, Scalar(value, type_)], 0)
    width = {"rs": 16, "r": 32, "rd": 64}[register]
    assert f"mov.b{width} \t%{register}1, {bits:#x};" in got
    assert "kernel_param_1" not in got


def test_what_fails_is_tried_again():
    """Nothing is kept of it; what succeeds is kept."""
    memory, runs, found = {}, [], []

    def make():
        runs.append(True)
        if len(runs) == 1:
            raise ValueError("the disk is full")
        return "made"

    with pytest.raises(ValueError, match="the disk is full"):
        cache.once(memory, "key", make)
    assert memory == {}
    assert [cache.once(memory, "key", make, lambda: found.append(True)) for _ in range(3)] == ["made"] * 3
    assert (len(runs), len(found)) == (2, 2)
