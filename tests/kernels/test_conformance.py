"""Every op, every case, every dtype: values and all gradients against float64, by reference, by default and by kernel."""

import jax.numpy as jnp
import pytest

from tests import numerics
from tests.specs import CASE_IDS, CASES, OPS, SPECS, cotangent, draw, function, those, truth, truth_vjp, value_and_vjp


def test_every_op_has_a_spec():
    """Each public op has a line in jtops/kernels/specs.py."""
    assert {f.__name__: f for f in OPS} == {name: spec.function for name, spec in SPECS.items()}


# Of float16, which goes bfloat16's way, one case of each op at once, and of bfloat16 where another op has the kernels; all of them
# in test-all and on the GPU.
def calls():
    for (spec, case), name in zip(CASES, CASE_IDS, strict=True):
        for dtype in ("float32", "bfloat16", "float16"):
            at_once = case is spec.cases[0] or dtype == "float32" or (dtype == "bfloat16" and not spec.alike)
            yield pytest.param(spec, case, dtype, id=f"{name}-{dtype}", marks=() if at_once else pytest.mark.slow)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("spec", "case", "dtype"), list(calls()))
def test_value_and_gradients(spec, case, dtype, implementation):
    assert dtype in spec.dtypes, f"{spec.name} does not list {dtype}; narrow the parametrisation if that is meant"
    operands = draw(spec, case, dtype)
    value = truth(spec, case, operands)
    g = cotangent(value.shape, dtype)
    wants = [value, *truth_vjp(spec, case, operands, g)]
    out, grads = value_and_vjp(function(spec, case, implementation=implementation), operands, g)
    ref, ref_grads = value_and_vjp(function(spec, case, implementation="xla"), operands, g)
    assert out.dtype == jnp.dtype(spec.result_dtype or dtype)
    assert [x.dtype for x in grads] == [jnp.dtype(dtype)] * len(grads)
    for i, (got, reference, want) in enumerate(zip((out, *grads), (ref, *ref_grads), wants, strict=True)):
        numerics.check(got, reference, want, key=(spec.name, case.id), what=f"gradient {i - 1}" if i else "value")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("spec", "case"), those("small"))
def test_default_on_cpu_is_the_reference(spec, case, dtype):
    operands = draw(spec, case, dtype)
    g = cotangent(truth(spec, case, operands).shape, dtype)
    got, want = (value_and_vjp(function(spec, case, implementation=i), operands, g) for i in (None, "xla"))
    numerics.close(got, want, 1e-6)
