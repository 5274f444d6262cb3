"""Other implementations of an op, where they are installed: op -> name -> function of the op's operands and options.

A peer takes what the op's public function takes, by name, and returns None if it has nothing for these arguments.
"""

import importlib.util

import jax
import jax.numpy as jnp


def _cudnn_attention(q, k, v, *, causal=False):
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=bool(causal), implementation="cudnn")


def _tokamax_attention(q, k, v, *, causal=False):
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    tokamax = importlib.import_module("tokamax")
    return lambda q, k, v: tokamax.dot_product_attention(q, k, v, is_causal=bool(causal))


def _flash_attention_3(q, k, v, *, causal=False):
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return None
    package = importlib.import_module("dew_flash_attn")  # FlashAttention-3's kernels for JAX; its causal mask ends at the last key
    if causal and q.shape[1] != k.shape[1]:
        return None
    return lambda q, k, v: package.flash_mha(q, k, v, is_causal=bool(causal))


def _plain_matmul(a, b, bias=None, residual=None, *, activation=None):
    """The op as one writes it: the product is rounded to its dtype, and XLA fuses the rest as far as it can."""

    def f(a, b, bias=None, residual=None):
        y = jnp.matmul(a, b, precision="highest")
        y = y if bias is None else y + bias
        y = y if activation is None else getattr(jax.nn, activation)(y)
        return y if residual is None else y + residual

    return f


def _plain_glu(x, w_gate, w_up, *, activation="silu"):
    """The op as one writes it: both products are rounded to their dtype before they meet."""

    def f(x, w_gate, w_up):
        gate, up = (jnp.matmul(x, w, precision="highest") for w in (w_gate, w_up))
        return getattr(jax.nn, activation)(gate) * up

    return f


PEERS = {
    "flash_attention": {"cudnn": _cudnn_attention},
    "matmul": {"jnp": _plain_matmul},
    "gated_linear_unit": {"jnp": _plain_glu},
}
for name, package, peer in (("tokamax", "tokamax", _tokamax_attention), ("fa3", "dew_flash_attn", _flash_attention_3)):
    if importlib.util.find_spec(package):
        PEERS["flash_attention"][name] = peer
