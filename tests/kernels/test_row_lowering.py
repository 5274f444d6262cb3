"""What programs with row ops are made of: one compiled kernel for a bucket of shapes, one launch under vmap, and which collectives."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jtops
from jtops.core import compile as compiling
from tests import numerics
from tests.kernels import lowered
from tests.kernels.test_sharding import collectives, devices, mesh, normal, put

# ------------------------------------------------------------------------------------------- one kernel for many shapes


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def with_gradients(f):
    def both(*operands):
        value, pullback = jax.vjp(f, *operands)
        return value, pullback(jax.tree.map(lambda v: v * 2, value))

    return both


def number_compiled(f, *calls) -> int:
    """How many kernels these calls compile, forward and backward. Nothing is: the keys of Triton's work are counted."""

    def pretend(kernel, bound, signature, ones, options, target):
        return compiling.CompiledKernel(kernel.__name__, target, "", 4, 1, 0, 0, 1, (), ones, None)

    with mock.patch.object(compiling, "_compiled", {}), mock.patch.object(compiling, "_compile", pretend):
        for operands in calls:
            lowered.text(with_gradients(f), *operands)
        return len(compiling._compiled)


OF_ROWS = {  # op and its operands for r rows of n
    "add": (jtops.add, lambda r, n: (struct(r, n), struct(n))),
    "softmax": (jtops.softmax, lambda r, n: (struct(r, n),)),
    "masked": (lambda x: jtops.softmax(x, where=x > 0), lambda r, n: (struct(r, n),)),
    "log_softmax": (jtops.log_softmax, lambda r, n: (struct(r, n),)),
    "logsumexp": (lambda x: jtops.logsumexp(x, -1), lambda r, n: (struct(r, n),)),
    "layer_norm": (jtops.layer_norm, lambda r, n: (struct(r, n), struct(n), struct(n))),
    "add_rms_norm": (jtops.add_rms_norm, lambda r, n: (struct(r, n), struct(r, n), struct(n))),
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_shapes_of_a_bucket_share_their_kernels(name):
    """Any number of rows, and any length of one power of two that 16 divides; another alignment is another kernel, once."""
    f, operands = OF_ROWS[name]
    one = number_compiled(f, operands(8192, 4096))
    alike = [operands(*shape) for shape in ((8192, 4096), (8000, 4096), (7001, 4096), (4099, 4080), (8192, 2064))]
    assert number_compiled(f, *alike) == one
    for lengths in ((4095, 4001), (4088, 4072)):
        assert number_compiled(f, *alike, *(operands(8192, n) for n in lengths)) == 2 * one


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_long_shapes_of_a_bucket_share_their_kernels(name):
    f, operands = OF_ROWS[name]
    for r in (64, 4096):
        one = number_compiled(f, operands(r, 131072))
        assert number_compiled(f, operands(r, 131072), operands(r - 3, 131072), operands(r, 131072 - 16)) == one


def test_strided_shapes_of_a_bucket_share_their_kernels():
    f = lambda x: jtops.softmax(x, 1)
    one = number_compiled(f, [struct(64, 1000, 48)])
    assert number_compiled(f, *([struct(*shape)] for shape in ((64, 1000, 48), (61, 999, 48), (64, 600, 64)))) == one
