"""The axis rule of an op: which array axis is which."""

import dataclasses
import re

Axes = tuple[tuple[str, ...], ...]  # of one array: its core dims, each the names of the axes it is made of


@dataclasses.dataclass(frozen=True, slots=True)
class AxisRule:
    """Core axes of operands, results and residuals, and the axes that must not be split over devices."""

    operands: tuple[Axes, ...]
    outs: tuple[Axes, ...]
    residuals: tuple[Axes, ...]
    whole: frozenset[str]

    @classmethod
    def parse(cls, axes: str, residuals: str = "", whole: str = "") -> "AxisRule":
        """From ``"s (g r) d, t g d -> s (g r) d"``: dims apart by blanks, arrays by commas, ``()`` for an array without dims."""
        ins, _, outs = axes.partition("->")
        rule = cls(_arrays(ins), _arrays(outs), _arrays(residuals), frozenset(whole.split()))
        known = {name for array in (*rule.operands, *rule.outs, *rule.residuals) for dim in array for name in dim}
        if not rule.operands or not rule.outs or not rule.whole <= known:
            raise ValueError(f"axis rule {axes!r} (residuals {residuals!r}, whole {whole!r}) is malformed.")
        return rule


def _arrays(text: str) -> tuple[Axes, ...]:
    def dims(array):
        parts = re.findall(r"\([^)]*\)|\w+", array)
        return tuple(names for part in parts if (names := tuple(re.findall(r"\w+", part))))

    return tuple(dims(array) for array in text.split(",")) if text.strip() else ()
