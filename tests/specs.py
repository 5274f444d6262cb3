"""Every op's SPEC, and how its cases become calls."""

import dataclasses
import inspect
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import oracles

OPS = [f for name in jtops.__all__ if inspect.isfunction(f := getattr(jtops, name)) and f.__module__.startswith("jtops.kernels")]


def _spec(op):
    """A module has one SPEC, or SPECS of the ops that share its kernels."""
    module = sys.modules[op.__module__]
    given = [module.SPEC] if hasattr(module, "SPEC") else getattr(module, "SPECS", [])
    return next((spec for spec in given if spec.function is op), None)


SPECS = {f.__name__: _spec(f) for f in OPS}
# The frame is one: three ops go through all of its tests at once, the others through the plainest; all of them in test-all.
MODELS = ("add", "softmax", "layer_norm")


def in_parts(at_once):
    """Ops, those not `at_once` in test-all."""
    return [pytest.param(s, id=name, marks=() if name in at_once else pytest.mark.slow) for name, s in SPECS.items()]


ALIKE = ("rms_norm", "add_rms_norm", "log_softmax")  # run the kernels of layer_norm, add_layer_norm and softmax
every_op = pytest.mark.parametrize("spec", in_parts([name for name in SPECS if name not in ALIKE]))
some_ops = pytest.mark.parametrize("spec", in_parts(MODELS))
CASES = [(spec, case) for spec in SPECS.values() if spec is not None for case in spec.cases]
CASE_IDS = [f"{spec.name}-{case.id}" for spec, case in CASES]


def rng(*names) -> np.random.Generator:
    """The same stream in every process."""
    return np.random.default_rng(zlib.crc32("-".join(names).encode()))


def draw(spec, case, dtype="float32", *, batch=()):
    """The case's operands as JAX arrays, each with more leading axes if asked for."""
    drawn = [
        None if i is None else dataclasses.replace(i, shape=(*batch, *i.shape)).draw(rng(spec.name, case.id)) for i in case.inputs
    ]
    return [None if v is None else jnp.asarray(v) if v.dtype == bool else jnp.asarray(v, dtype) for v in drawn]


def cotangent(shape, dtype="float32"):
    return jnp.asarray(rng("cotangent").normal(size=shape), dtype)


def results(spec, case, **more):
    """The op with the case's options: a function of its operands, with all of its results."""
    config = {} if case.config is None or more.get("implementation") == "xla" else {"config": case.config}
    options = {**case.options, **config, **more}
    return lambda *operands: spec.function(**dict(zip(spec.operands, operands, strict=True)), **options)


def one(result):
    """A result as it is; several as their weighted sum, which is what the tests that all ops go through look at."""
    return sum(x * WEIGHTS[i] for i, x in enumerate(result)) if isinstance(result, tuple) else result


WEIGHTS = (1.0, 0.5)  # exact in every dtype


def function(spec, case, **more):
    """The op with the case's options: a function of its operands to one array."""
    f = results(spec, case, **more)
    return lambda *operands: one(f(*operands))


def truth(spec, case, operands):
    wide = [None if x is None else np.asarray(x) if x.dtype == bool else np.asarray(x, np.float64) for x in operands]
    return one(getattr(oracles, spec.name)(*wide, **case.options))


def truth_vjp(spec, case, operands, g):
    wide = [None if x is None else np.asarray(x) if x.dtype == bool else np.asarray(x, np.float64) for x in operands]
    op, g = getattr(oracles, spec.name), np.asarray(g, np.float64)
    several = isinstance(op(*wide, **case.options), tuple)
    return getattr(oracles, f"{spec.name}_vjp")(*wide, g=tuple(g * w for w in WEIGHTS) if several else g, **case.options)


def floating(operands):
    """Positions of the operands that have gradients."""
    return tuple(i for i, x in enumerate(operands) if x is not None and jnp.issubdtype(x.dtype, jnp.floating))


def value_and_vjp(f, operands, g):
    """The value of `f` and the gradients of its floating operands, under jit as users have it."""
    where = floating(operands)

    def both(operands, g):
        def of(*moved):
            full = list(operands)
            for i, x in zip(where, moved, strict=True):
                full[i] = x
            return f(*full)

        value, pullback = jax.vjp(of, *(operands[i] for i in where))
        return value, pullback(g)

    return jax.jit(both)(operands, g)
