"""dot_product_attention against ``jax.nn``'s own: the same arguments, defaults and results."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics

ways = pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
ours, theirs = jtops.dot_product_attention, jax.nn.dot_product_attention


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def operands(s=12, t=12, h=4, g=2, b=2):
    return normal(b, s, h, 16), normal(b, t, g, 16, seed=1), normal(b, t, g, 16, seed=2)


def test_arguments_and_defaults_are_jax_nns():
    """Theirs by the same names, in the same order where they may be positional; one more of our own."""
    mine, own = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    said = lambda parameters: {name: (p.kind, p.default) for name, p in parameters.items()}
    assert {name: x for name, x in said(mine).items() if name != "config"} == said(own)
    assert list(mine)[:5] == list(own)[:5]


OPTIONS = {
    "is_causal": [False, True],
    "local_window_size": [None, 4, (5, 0), (3, 7)],
    "bias": [None, (2, 4, 12, 12), (1, 4, 12, 12), (12, 12)],
    "mask": [None, (2, 1, 12, 12), (4, 12, 12), (1, 1, 1, 12)],
    "lengths": [(None, None), (None, (12, 7)), ((9, 12), None), ((5, 12), (12, 3))],
    "scale": [None, 0.7],
}


def combinations():
    """Some of all: every pair of an option's value and another's stands in one of them at least."""
    rng = np.random.default_rng(0)
    wanted = {
        (a, i, b, j) for a, b in itertools.combinations(OPTIONS, 2) for i in range(len(OPTIONS[a])) for j in range(len(OPTIONS[b]))
    }
    found = []
    while wanted:
        call = {name: int(rng.integers(len(values))) for name, values in OPTIONS.items()}
        pairs = {(a, call[a], b, call[b]) for a, b in itertools.combinations(OPTIONS, 2)}
        if wanted & pairs:
            wanted -= pairs
            found.append({name: OPTIONS[name][i] for name, i in call.items()})
    return found


@ways
def test_combinations_agree(implementation):
    """Values and all gradients; of queries that see a key, since to those that see none jax.nn gives the mean of all values."""
    q, k, v = operands()
    rng = np.random.default_rng(1)
    for call in combinations():
        lengths = [None if x is None else jnp.asarray(x, jnp.int32) for x in call["lengths"]]
        bias = None if call["bias"] is None else normal(*call["bias"], seed=3)
        mask = None if call["mask"] is None else jnp.asarray(rng.random(call["mask"]) < 0.8)
        options = {
            **{name: call[name] for name in ("is_causal", "local_window_size", "scale")},
            "query_seq_lengths": lengths[0],
            "key_value_seq_lengths": lengths[1],
        }
        _, residual = ours(q, k, v, bias, mask, **options, return_residual=True, implementation="xla")
        alive = (residual > -jnp.inf)[..., None]
        given = [q, k, v, *([] if bias is None else [bias])]

        def results(f, given=given, mask=mask, options=options, alive=alive, **more):
            def g(q, k, v, bias=None):
                out, residual = f(q, k, v, bias, mask, **options, **more, return_residual=True)
                return jnp.where(alive, out, 0), jnp.where(alive[..., 0], jax.lax.stop_gradient(residual), 0)

            out, pullback = jax.vjp(g, *given)
            return out, pullback(out)

        with jax.default_matmul_precision("highest"):
            want = results(theirs)
        numerics.close(results(ours, implementation=implementation), want, 5e-5)


@ways
def test_without_a_batch(implementation):
    q, k, v = (x[0] for x in operands())
    bias, mask = normal(4, 12, 12, seed=3), jnp.tril(jnp.ones((12, 12), bool))
    for more in ({}, {"bias": bias}, {"bias": bias[None], "mask": mask}, {"key_value_seq_lengths": jnp.asarray([7], jnp.int32)}):
        got = ours(q, k, v, **more, return_residual=True, implementation=implementation)
        with jax.default_matmul_precision("highest"):
            numerics.close(got, theirs(q, k, v, **more, return_residual=True), 1e-5)


@ways
def test_what_differs(implementation):
    """A query without a key, and the residual: float32, with a gradient."""
    q, k, v = (x.astype(jnp.bfloat16) for x in operands())
    mask = jnp.ones((12, 12), bool).at[3].set(False)
    f = lambda q: ours(q, k, v, mask=mask, return_residual=True, implementation=implementation)
    out, residual = f(q)
    assert not np.asarray(out[:, 3]).any()
    assert (residual[:, 3] == -jnp.inf).all()
    assert residual.dtype == jnp.float32
    assert np.asarray(jax.grad(lambda q: jnp.where(residual > -jnp.inf, f(q)[1], 0).sum())(q)).any()


Q = jnp.ones((2, 4, 6, 8))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ours(Q, Q[0], Q[0]), ValueError, "query, key and value must all be"),
        (lambda: ours(Q[None], Q[None], Q[None]), ValueError, "query, key and value must all be"),
        (lambda: ours(Q, Q, Q[..., :4]), ValueError, "key and value must have one shape"),
        (lambda: ours(Q, Q[:1], Q[:1]), ValueError, "axis b is 2 elsewhere but 1 in key"),
        (lambda: ours(Q, Q, Q, jnp.ones((3, 1, 1, 4))), ValueError, r"bias must broadcast to \[b, h, s, t\], here \(2, 6, 4, 4\)"),
        (lambda: ours(Q, Q, Q, mask=jnp.ones((4, 4))), TypeError, "mask must be boolean"),
        (lambda: ours(Q, Q, Q, query_seq_lengths=jnp.ones(3, jnp.int32)), ValueError, r"must have shape \[b\], here \(2,\)"),
        (lambda: ours(Q, Q, Q, local_window_size=(-1, 0)), ValueError, "none negative"),
        (lambda: ours(Q, Q, Q, implementation="cudnn", config=jtops.Config(variant="portable")), ValueError, "takes no config"),
        (lambda: ours(Q, Q, Q, implementation="mosaic"), ValueError, "implementation must be"),
    ],
)  # fmt: skip
def test_malformed_calls(call, error, match):
    with pytest.raises(error, match=match):
        call()
