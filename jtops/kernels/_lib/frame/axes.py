"""The axis rule of an op: which array axis is which."""

import dataclasses
from collections.abc import Iterable

from jtops.core.mesh.partition import Dims, parse_arrays


@dataclasses.dataclass(frozen=True, slots=True)
class AxisRule:
    """Core axes of operands, results and residuals, and the axes that must not be split over devices."""

    operands: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    residuals: tuple[Dims, ...]
    whole: frozenset[str]

    @classmethod
    def of(cls, operands: Iterable[str], results: Iterable[str], residuals: Iterable[str], whole: str) -> "AxisRule":
        """Make a rule of the dims of each array, apart by blanks: ``"s (g r) d"``; ``""`` for an array without dims."""
        texts = [tuple(side) for side in (operands, results, residuals)]
        ins, outs, kept = (tuple(dims for text in side for dims in parse_arrays(text or "()")) for side in texts)
        if not ins or not outs or [len(ins), len(outs), len(kept)] != [len(side) for side in texts]:
            raise ValueError(f"an op needs operands and results, and the dims of one array for each; got {texts}.")
        rule = cls(ins, outs, kept, frozenset(whole.split()))
        if not rule.whole <= rule.names:
            raise ValueError(f"no array has axes {', '.join(sorted(rule.whole - rule.names))}, which shall be whole.")
        return rule

    @property
    def names(self) -> set[str]:
        """Every axis."""
        return {name for array in (*self.operands, *self.outs, *self.residuals) for dim in array for name in dim}
