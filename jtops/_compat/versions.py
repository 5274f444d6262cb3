"""Version numbers."""


def parsed(text: str) -> tuple[int, ...]:
    """The numbers of a version: ``"3.6.0"`` is (3, 6, 0); characters other than digits are left out."""
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:3])
