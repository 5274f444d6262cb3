"""The oracles themselves: gradients against central differences in float64."""

import numpy as np
import pytest

from jtops.kernels._lib.spec import floating
from tests.specs import CASE_IDS, CASES, truth, truth_vjp


@pytest.mark.parametrize(("spec", "case"), CASES, ids=CASE_IDS)
def test_vjp_is_the_derivative(spec, case):
    rng = np.random.default_rng(7)
    operands = [i.draw(rng) for i in case.given]
    op = lambda *operands: truth(spec, case, operands)
    g = rng.normal(size=op(*operands).shape)
    where = floating(operands)
    for i, gradient in zip(where, truth_vjp(spec, case, operands, g), strict=True):
        x = operands[i]
        assert gradient.shape == x.shape
        direction, h = rng.normal(size=x.shape), 1e-6
        shifted = lambda s: [y if j != i else y + s * direction for j, y in enumerate(operands)]
        with np.errstate(invalid="ignore"):
            difference = np.asarray((op(*shifted(h)) - op(*shifted(-h))) / (2 * h))
        difference = np.where(np.isnan(difference), 0.0, difference)  # of what is -inf whatever the operands
        np.testing.assert_allclose((gradient * direction).sum(), (difference * g).sum(), rtol=2e-6, atol=1e-6 * np.abs(g).sum())
