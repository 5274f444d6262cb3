"""What a compiled kernel takes: registers, spilled bytes, shared memory; as ptxas and AMD's assembler report them."""

from jtops.core.compile.resources import used as of

__all__ = ["of"]
