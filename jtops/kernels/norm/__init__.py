"""layer_norm and rms_norm, also of a sum of two arrays."""

from jtops.kernels.norm.op import add_layer_norm, add_rms_norm, layer_norm, rms_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]
