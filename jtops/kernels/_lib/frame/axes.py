"""The axis rule of an op: which array axis is which."""

import dataclasses

from jtops.core.mesh.partition import Dims, parse_arrays


@dataclasses.dataclass(frozen=True, slots=True)
class AxisRule:
    """Core axes of operands, results and residuals, and the axes that must not be split over devices."""

    operands: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    residuals: tuple[Dims, ...]
    whole: frozenset[str]

    @classmethod
    def parse(cls, axes: str, residuals: str = "", whole: str = "") -> "AxisRule":
        """From ``"s (g r) d, t g d -> s (g r) d"``: dims apart by blanks, arrays by commas, ``()`` for an array without dims."""
        ins, _, outs = axes.partition("->")
        rule = cls(parse_arrays(ins), parse_arrays(outs), parse_arrays(residuals), frozenset(whole.split()))
        known = {name for array in (*rule.operands, *rule.outs, *rule.residuals) for dim in array for name in dim}
        if not rule.operands or not rule.outs or not rule.whole <= known:
            raise ValueError(f"axis rule {axes!r} (residuals {residuals!r}, whole {whole!r}) is malformed.")
        return rule
