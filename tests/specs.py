"""How the cases of the SPECs become tests: which run at once, what their operands are, and what the truth about them is."""

import inspect
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops.kernels._lib.spec import with_gradients
from jtops.kernels.specs import SPECS
from tests import oracles

OPS = [f for name in jtops.__all__ if inspect.isfunction(f := getattr(jtops, name)) and f.__module__.startswith("jtops.kernels")]
CASES = [(spec, case) for spec in SPECS.values() for case in spec.cases]
CASE_IDS = [f"{spec.name}-{case.id}" for spec, case in CASES]


def those(where, at_once=lambda spec, i: True):
    """Every op with each of its cases in ``spec.small`` or ``spec.meshed``; what is not `at_once` in test-all.

    The plainest case goes by the op's name alone.
    """
    return [
        pytest.param(spec, case, id=f"{name}-{case.id}" if i else name, marks=() if at_once(spec, i) else pytest.mark.slow)
        for name, spec in SPECS.items()
        for i, case in enumerate(getattr(spec, where))
    ]


def _each(where, at_once):
    return pytest.mark.parametrize(("spec", "case"), those(where, at_once))


# The frame is one: its models go through all of its tests at once, the others through the plainest; all of them in test-all.
every_op, every_meshed = (_each(where, lambda spec, i: not spec.alike) for where in ("small", "meshed"))
some_ops, some_meshed = (_each(where, lambda spec, i: spec.model and not i) for where in ("small", "meshed"))


def rng(*names) -> np.random.Generator:
    """The same stream in every process."""
    return np.random.default_rng(zlib.crc32("-".join(names).encode()))


def draw(spec, case, dtype="float32"):
    """The case's operands as JAX arrays, in a row, each from a stream of its own."""
    return [jnp.asarray(i.draw(rng(spec.name, case.id, *"n" * n)), i.dtype or dtype) for n, i in enumerate(case.given)]


def cotangent(shape, dtype="float32"):
    return jnp.asarray(rng("cotangent").normal(size=shape), dtype)


def one(result):
    """A result as it is; several as their weighted sum, which is what the tests that all ops go through look at."""
    return sum(x * WEIGHTS[i] for i, x in enumerate(result)) if isinstance(result, tuple) else result


WEIGHTS = (1.0, 0.5)  # exact in every dtype


def function(spec, case, **more):
    """The op with the case's options: a function of its operands, in a row, to one array."""
    f = spec.call(case, **more)
    return lambda *operands: one(f(*operands))


def wide(operands):
    """As the oracles take them."""
    return [np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x) for x in operands]


def truth(spec, case, operands):
    return one(getattr(oracles, spec.name)(**case.keywords(wide(operands)), **case.options))


def truth_vjp(spec, case, operands, g):
    """The gradients of the floating operands."""
    given, g = case.keywords(wide(operands)), np.asarray(g, np.float64)
    op, vjp = getattr(oracles, spec.name), getattr(oracles, f"{spec.name}_vjp")
    several = isinstance(op(**given, **case.options), tuple)
    found = vjp(**given, g=tuple(g * w for w in WEIGHTS) if several else g, **case.options)
    by_name = dict(zip(inspect.signature(vjp).parameters, found, strict=False))
    return [by_name[name] for name, x in given.items() if not isinstance(x, tuple) and x.dtype == np.float64]


def value_and_vjp(f, operands, g):
    """The value of `f` and the gradients of its floating operands, under jit as users have it; `g` in the value's dtype."""
    cast = lambda operands, g: jax.tree.map(lambda x, g: g.astype(x.dtype), jax.eval_shape(f, *operands), g)
    return jax.jit(lambda operands, g: with_gradients(f)(*operands, cotangent=cast(operands, g)))(operands, g)
