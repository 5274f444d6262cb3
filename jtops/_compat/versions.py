"""Version numbers."""


def parsed(text: str) -> tuple[int, ...]:
    """``"3.6.0"`` as (3, 6, 0); whatever is no digit is left out."""
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:3])
