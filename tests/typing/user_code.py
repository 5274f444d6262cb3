"""A user's program. mypy must flag the lines that say `wrong`, with that error code, and no other."""

import jax.numpy as jnp

import jtops
import jtops.linen as nn
from jtops import nnx

x = jnp.ones((2, 4))
rngs = nnx.Rngs(0)

nnx.Linear(4, 4, rngs=rngs)(x)
nnx.Linear("a", 4, rngs=rngs)  # wrong: arg-type
nnx.Embed(5, 3, rngs=rngs)
nnx.Embed("five", 3, rngs=rngs)  # wrong: arg-type
nnx.NotThere  # wrong: attr-defined
nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)(x, is_causal=True)
nn.Dense(4)
nn.Dense("x")  # wrong: arg-type
nn.not_there  # wrong: attr-defined

with jtops.config.implementation("interpret"), jtops.config.flax_fallback("error"):
    jtops.softmax(x)
jtops.config.implementation("cuda")  # wrong: arg-type
jtops.config.launch("quick")  # wrong: arg-type

labels = jnp.zeros(2, int)
jtops.cross_entropy(x, labels).sum()
loss, lse = jtops.cross_entropy(x, labels, return_lse=True)
jtops.cross_entropy(x, labels, reduction="max")  # wrong: call-overload
q = jnp.ones((1, 4, 2, 16))
out, residual = jtops.dot_product_attention(q, q, q, return_residual=True)
jtops.dot_product_attention(q, q, q, is_causal=True).sum()
jtops.dot_product_attention(q, q, q, implementation="flash")  # wrong: call-overload
