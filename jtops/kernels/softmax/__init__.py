"""softmax, log_softmax and logsumexp."""

from jtops.kernels.softmax.op import log_softmax, logsumexp, softmax

__all__ = ["log_softmax", "logsumexp", "softmax"]
