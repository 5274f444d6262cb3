"""Exceptions that jtops raises on purpose.

A malformed call raises the builtin ``TypeError`` or ``ValueError``; the classes here say what Python has no name for.
"""


class JtopsError(Exception):
    """Base of every exception class that jtops defines."""


class UnsupportedError(JtopsError, NotImplementedError):
    """A legal request that no kernel serves, on this platform or at all. The message names the limit and the way out."""


class KernelCompileError(JtopsError, RuntimeError):
    """Triton could not turn a kernel into machine code for the wanted target."""


class InterpreterError(JtopsError, RuntimeError):
    """A kernel failed while it was being interpreted. The message names the program and the source line."""
