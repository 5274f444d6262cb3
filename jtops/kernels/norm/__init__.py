"""layer_norm and rms_norm."""

from jtops.kernels.norm.op import layer_norm, rms_norm

__all__ = ["layer_norm", "rms_norm"]
