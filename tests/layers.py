"""What the tests of jtops.linen and jtops.nnx share."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
NORMS, PRODUCT, ATTENTION = {"layer_norm", "rms_norm"}, {"matmul"}, {"matmul", "flash_attention"}


def ops_in(f, *args) -> set[str]:
    """The ops that a call of `f` binds."""
    return set(re.findall(r"name=(layer_norm|rms_norm|matmul|flash_attention)\b", str(jax.make_jaxpr(f)(*args))))


def draw(*shape, seed=0, dtype=F32):
    x = np.random.default_rng([seed, *shape]).standard_normal(shape) * 2
    return jnp.asarray(np.round(x) if jnp.issubdtype(dtype, jnp.integer) else x, dtype)


def value_and_grads(f, *args):
    """The value of `f`, and the gradients of a fixed weighting of it with respect to the floating leaves of `args`."""
    leaves, treedef = jax.tree.flatten(args)

    def loss(leaves):
        y = f(*jax.tree.unflatten(treedef, leaves))
        return (y.astype(F32) * jnp.cos(jnp.arange(y.size, dtype=F32)).reshape(y.shape)).sum(), y

    grads, y = jax.grad(loss, has_aux=True, allow_int=True)(leaves)
    return y, [g for g in grads if g.dtype != jax.dtypes.float0]


def shortest(*trees) -> float:
    """A tolerance for the shortest floating dtype among these."""
    eps = [float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(trees) if jnp.issubdtype(x.dtype, jnp.floating)]
    return 1e-5 if max(eps, default=0) < 1e-5 else 4 * max(eps)


def identical(got, want) -> None:
    """The same tree, dtypes and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def agree(got, want, tolerance=None) -> None:
    """The same tree, shapes and dtypes, and values but for rounding at the size of the largest: gradients may be 0 but for that."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    tolerance = tolerance or shortest(got, want)
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    largest = max(float(np.max(np.abs(np.asarray(b, np.complex128)), initial=0.0)) for _, b in pairs)
    for a, b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(*(np.asarray(x, np.complex128) for x in (a, b)), rtol=tolerance, atol=tolerance * largest)


def way(name):
    """Context of an implementation; None is the default."""
    return jtops.config.implementation(name)


def options(cases):
    """pytest parameters of the cases: one in five at once, all of them in test-all."""
    return [pytest.param(*case, id=f"{i}-{case[0]}", marks=() if i % 5 == 0 else pytest.mark.slow) for i, case in enumerate(cases)]
