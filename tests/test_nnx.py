"""jtops.nnx against flax.nnx: the same parameters bit for bit, the same results up to rounding, and ops where they serve."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtops
import jtops.nnx as jnnx
from tests import layers as checks
from tests.layers import ATTENTION, BF16, F16, F32, PRODUCT, agree, draw, identical, ops_in, shortest, value_and_grads, way

SPREAD = nnx.initializers.uniform(1.0)
NONE: set[str] = set()
KEY = jax.random.key(1)
X = (2, 6, 8)
TOKENS = jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
CAUSAL, PADDING = nnx.make_causal_mask(TOKENS), nnx.make_attention_mask(TOKENS > 0, TOKENS > 0)


def rngs(seed=0):
    return nnx.Rngs(jax.random.key(seed, impl="unsafe_rbg"))  # quicker to compile


def half(arrays, dtype):
    return tuple(None if x is None else x.astype(BF16) for x in arrays)


def mixed(arrays, dtype):
    return (arrays[0].astype(BF16), *arrays[1:])


# layer, arguments, keywords, options of the call, dtype of the input, ops that are to serve it
NORM_TABLE = [
    ({}, {}, F32, True),
    ({}, {}, BF16, True),
    ({}, {}, jnp.int32, True),
    ({"epsilon": 0.1}, {}, F32, True),
    ({"dtype": BF16}, {}, F32, True),
    ({"dtype": F16, "param_dtype": BF16}, {}, F32, True),
    ({"param_dtype": BF16}, {}, BF16, True),
    ({"use_scale": False}, {}, F32, True),
    ({"use_fast_variance": False}, {}, F32, True),
    ({"reduction_axes": (2,), "feature_axes": [-1]}, {}, F32, True),
    ({"promote_dtype": half}, {}, F32, True),
    ({"promote_dtype": mixed}, {}, F32, True),
    ({"reduction_axes": (1, 2)}, {}, F32, False),
    ({}, {"mask": draw(*X) > -1.0}, F32, False),
    ({}, {}, jnp.complex64, False),
]
CASES = (
    [
        (
            "LayerNorm",
            (8,),
            {"scale_init": SPREAD, "bias_init": SPREAD} | fields,
            options,
            dtype,
            {"layer_norm"} if served else NONE,
        )
        for fields, options, dtype, served in [*NORM_TABLE, ({"use_bias": False}, {}, F32, True)]
    ]
    + [
        ("RMSNorm", (8,), {"scale_init": SPREAD} | fields, options, dtype, {"rms_norm"} if served else NONE)
        for fields, options, dtype, served in NORM_TABLE
    ]
    + [
        ("Linear", (8, 5), {"bias_init": SPREAD} | fields, {}, dtype, ops)
        for fields, dtype, ops in [
            ({}, F32, PRODUCT),
            ({}, BF16, PRODUCT),
            ({}, jnp.int32, PRODUCT),
            ({}, jnp.complex64, NONE),
            ({"use_bias": False}, F32, PRODUCT),
            ({"dtype": BF16}, BF16, PRODUCT),
            ({"param_dtype": BF16}, F32, PRODUCT),
            ({"kernel_init": SPREAD}, F32, PRODUCT),
            ({"precision": jax.lax.Precision.HIGHEST}, F32, PRODUCT),
            ({"precision": (jax.lax.Precision.HIGHEST,) * 2}, F32, NONE),
            ({"preferred_element_type": F32, "dtype": BF16}, F32, PRODUCT),
            ({"promote_dtype": half}, F32, PRODUCT),
            ({"promote_dtype": mixed}, F32, NONE),
            ({"dot_general": jax.lax.dot_general}, F32, NONE),
        ]
    ]
    + [
        ("LinearGeneral", (inputs, (3, 4)), {"bias_init": SPREAD} | fields, {}, F32, ops)
        for inputs, fields, ops in [
            (8, {}, PRODUCT),
            (8, {"dtype": BF16}, PRODUCT),
            ((6, 8), {"axis": (-2, -1)}, PRODUCT),
            ((2, 8), {"axis": (0, 2)}, NONE),
            (8, {"batch_axis": {0: 2}}, PRODUCT),
            (8, {"batch_axis": {0: 2, 1: 6}, "use_bias": False}, PRODUCT),
            (8, {"preferred_element_type": F32, "dtype": BF16}, PRODUCT),
            (8, {"dot_general": jax.lax.dot_general}, NONE),
            (8, {"dot_general_cls": lambda: jax.lax.dot_general}, NONE),
        ]
    ]
    + [
        ("MultiHeadAttention", (4, 8), {"bias_init": SPREAD, "decode": False} | fields, options, dtype, ops)
        for fields, options, dtype, ops in [
            ({}, {}, F32, ATTENTION),
            ({}, {"is_causal": True}, F32, ATTENTION),
            ({"num_kv_heads": 2}, {"is_causal": True}, F32, ATTENTION),
            ({"num_kv_heads": 1, "use_bias": False}, {}, F32, ATTENTION),
            ({"qkv_features": 12, "out_features": 5}, {}, F32, ATTENTION),
            ({"dtype": BF16}, {}, F32, ATTENTION),
            ({"param_dtype": BF16}, {"is_causal": True}, BF16, ATTENTION),
            ({"precision": jax.lax.Precision.HIGHEST}, {}, F32, ATTENTION),
            ({"normalize_qk": True, "qkv_features": 16}, {}, F32, ATTENTION),
            ({"dropout_rate": 0.5, "deterministic": True}, {}, F32, ATTENTION),
            ({"dropout_rate": 0.5, "keep_rngs": False}, {"deterministic": True}, F32, ATTENTION),
            ({"dropout_rate": 0.5}, {"deterministic": False, "is_causal": True}, F32, PRODUCT),
            ({"dropout_rate": 0.5, "broadcast_dropout": False, "deterministic": False}, {}, F32, PRODUCT),
            ({}, {"mask": CAUSAL}, F32, ATTENTION),
            ({}, {"mask": PADDING}, F32, ATTENTION),
            ({}, {"mask": PADDING, "is_causal": True}, F32, ATTENTION),
            ({}, {"mask": CAUSAL, "sow_weights": True}, F32, PRODUCT),
            ({"attention_fn": nnx.dot_product_attention}, {}, F32, PRODUCT),
            ({"qkv_dot_general": None, "out_dot_general": None}, {}, F32, {"flash_attention"}),
            ({"out_dot_general_cls": lambda: jax.lax.dot_general}, {}, F32, ATTENTION),
        ]
    ]
)


def functional(layer, **options):
    """(f(state, x), state): the layer as a function of its whole state, which it may change for itself."""
    graph, state = nnx.split(layer)
    return lambda state, x: nnx.merge(graph, state, copy=True)(x, **options), state


def plain(state):
    return jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, nnx.to_pure_dict(state)
    )


@pytest.mark.parametrize(("name", "args", "fields", "options", "dtype", "ops"), checks.options(CASES))
def test_every_option(name, args, fields, options, dtype, ops):
    x = draw(*X, dtype=dtype)
    theirs, ours = (getattr(module, name)(*args, rngs=rngs(), **fields) for module in (nnx, jnnx))
    assert isinstance(ours, getattr(nnx, name))
    identical(plain(nnx.state(ours)), plain(nnx.state(theirs)))
    results = []
    for layer in (ours, theirs):
        graph, params, rest = nnx.split(layer, nnx.Param, ...)
        f = lambda params, x, graph=graph, rest=rest: nnx.merge(graph, params, rest, copy=True)(x, **options)
        results.append(value_and_grads(f, params, x) if ops else f(params, x))
    got, want = results
    tolerance = shortest(nnx.to_pure_dict(params), x, want)
    agree(got, want, 0.03 if fields.get("promote_dtype") or "preferred_element_type" in fields else tolerance)
    f, state = functional(ours, **options)
    assert ops_in(f, state, x) == ops


class Block(nnx.Module):
    """A transformer block as users write one, with layers of flax.nnx or jtops.nnx."""

    def __init__(self, layers, rngs, dtype=None, **attention):
        self.norm = layers.LayerNorm(8, dtype=dtype, rngs=rngs)
        self.attention = layers.MultiHeadAttention(2, 8, dtype=dtype, decode=False, rngs=rngs, **attention)
        self.norm2 = layers.RMSNorm(8, dtype=dtype, rngs=rngs)
        self.up = layers.Linear(8, 16, dtype=dtype, rngs=rngs)
        self.down = layers.LinearGeneral(16, 8, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


ALL = {"layer_norm", "rms_norm", "matmul", "flash_attention"}


@pytest.mark.parametrize("dtype", [None, pytest.param(BF16, marks=pytest.mark.slow)])
def test_swap_by_import(dtype, tmp_path):
    """A model keeps its state's paths, initial values and results; and it takes checkpoints of Flax's, through orbax."""
    theirs, ours = (Block(layers, rngs(), dtype) for layers in (nnx, jnnx))
    state = nnx.state(theirs)
    identical(nnx.state(ours), state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        other = Block(jnnx, rngs(7), dtype)
        loaded = nnx.state(other)
        nnx.replace_by_pure_dict(loaded, checkpointer.restore(tmp_path / "model", nnx.to_pure_dict(loaded)))
        nnx.update(other, loaded)
    identical(nnx.state(other), state)
    x = draw(*X)
    (f, mine), (g, flax) = functional(other), functional(theirs)
    agree(value_and_grads(f, mine, x), value_and_grads(g, flax, x), 0.06 if dtype else 1e-4)
    assert ops_in(f, mine, x) == ALL


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_the_kernel_itself(implementation):
    """The same by the kernels, interpreted; and, where the reference is asked for, without a primitive."""
    f, state = functional(Block(jnnx, rngs(), num_kv_heads=1))
    g, flax = functional(Block(nnx, rngs(), num_kv_heads=1))
    x = draw(*X)
    with way(implementation):
        got = value_and_grads(jax.jit(f), state, x)
        served = ops_in(f, state, x)
    agree(got, value_and_grads(g, flax, x), 1e-4)
    assert served == (NONE if implementation == "xla" else ALL)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_case_29_norms(name):
    """Case 29: parameters and their gradients stay float32 where the layer computes in bfloat16; it is the bare op."""
    x, layer = draw(*X), getattr(jnnx, name)(X[-1], dtype=BF16, param_dtype=F32, scale_init=SPREAD, rngs=rngs())
    loss = lambda layer, x: ((layer(x).astype(F32) - 1.0) ** 2).sum()
    grads = nnx.jit(nnx.grad(loss))(layer, x)
    params = {path[0]: v[...] for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    assert all((p.dtype, p.shape) == (F32, X[-1:]) for p in [*params.values(), *jax.tree.leaves(grads)])
    y = layer(x)
    assert (y.dtype, y.shape) == (BF16, X)
    op = {"LayerNorm": jtops.layer_norm, "RMSNorm": jtops.rms_norm}[name]
    want = op(x.astype(BF16), **{k: v.astype(BF16) for k, v in params.items()})  # as Flax promotes them
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, np.float32))


def test_metadata():
    """Partitioning by initialisers and by metadata: the same variables with the same metadata."""
    init = lambda *names: nnx.with_partitioning(SPREAD, names)

    def model(layers):
        return nnx.List([
            layers.LayerNorm(8, scale_init=init("embed"), bias_metadata={"sharding_names": ("embed",)}, rngs=rngs()),
            layers.Linear(8, 4, kernel_init=init("embed", "mlp"), bias_init=init("mlp"), rngs=rngs()),
            layers.LinearGeneral(8, (2, 4), kernel_init=init("embed", "heads", None), kernel_metadata={"tag": 1}, rngs=rngs()),
            layers.MultiHeadAttention(2, 8, kernel_metadata={"tag": 2}, out_bias_metadata={"tag": 3}, decode=False, rngs=rngs()),
        ])  # fmt: skip

    with jax.set_mesh(jax.make_mesh((1, 1, 1), ("embed", "mlp", "heads"), (AxisType.Auto,) * 3)):
        got, want = (nnx.to_flat_state(nnx.state(model(layers))) for layers in (jnnx, nnx))
    assert [path for path, _ in got] == [path for path, _ in want]
    for (_, a), (_, b) in zip(got, want, strict=True):
        assert (type(a), a.get_metadata()) == (type(b), b.get_metadata())
        np.testing.assert_array_equal(a[...], b[...])


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)])
def test_on_a_mesh(axis_type):
    """A batch on many devices: the same values and gradients as on one. What out_sharding is asked of, XLA multiplies."""
    x = draw(4, 6, 8)
    f, state = functional(Block(jnnx, rngs()))
    want = value_and_grads(f, state, x)
    mesh = jax.make_mesh((4,), ("data",), (axis_type,))
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P("data")))
        got = value_and_grads(jax.jit(f), jax.device_put(state, NamedSharding(mesh, P())), split)
        if axis_type == AxisType.Explicit:
            layer = jnnx.Linear(8, 4, rngs=rngs())
            y = layer(split, out_sharding=P("data"))
            assert jax.typeof(y).sharding.spec == P("data", None, None)
            assert ops_in(lambda x: layer(x, out_sharding=P("data")), split) == NONE
    agree(jax.device_get(got), jax.device_get(want), 1e-4)


def test_scan_vmap_and_remat():
    """Layers stacked by nnx.vmap and run by nnx.scan, with nnx.remat, trained by nnx.jit and nnx.grad."""

    class Layer(nnx.Module):
        def __init__(self, layers, rngs):
            self.norm, self.linear = layers.LayerNorm(8, rngs=rngs), layers.Linear(8, 8, rngs=rngs)

        @nnx.remat
        def __call__(self, x):
            return x + self.linear(self.norm(x))

    def loss(model, x):
        return (nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model) ** 2).sum()

    results = []
    for layers in (jnnx, nnx):
        make = nnx.vmap(functools.partial(Layer, layers), in_axes=0, out_axes=0)
        model = make(nnx.Rngs(0).split(3))
        assert model.linear.kernel.shape == (3, 8, 8)
        results.append(nnx.jit(nnx.value_and_grad(loss))(model, draw(*X)))
    agree(*(jax.tree.leaves(r) for r in results), 1e-4)


def test_causal_attention():
    """Causal by construction: as is_causal, without a mask; joined with a mask, dropout or a bias it is right as well."""
    x = draw(*X)
    make = functools.partial(jnnx.MultiHeadAttention, 2, 8, decode=False, dropout_rate=0.5, deterministic=True)
    layer, flax = make(attention_fn=jnnx.causal_attention, rngs=rngs()), make(attention_fn=nnx.dot_product_attention, rngs=rngs())
    agree(layer(x), flax(x, is_causal=True), 1e-4)
    assert "6,6]" not in str(jax.make_jaxpr(layer)(x))
    agree(layer(x, mask=PADDING), flax(x, mask=nnx.combine_masks(CAUSAL, PADDING)), 1e-4)
    key = jax.random.key(3)
    agree(*(m(x, mask=CAUSAL, deterministic=False, rngs=nnx.Rngs(dropout=key)) for m in (layer, flax)), 1e-4)
    agree(layer(x, deterministic=False, rngs=nnx.Rngs(dropout=key)),
          flax(x, mask=CAUSAL, deterministic=False, rngs=nnx.Rngs(dropout=key)), 1e-4)  # fmt: skip


def test_attention_function():
    """The functions take every argument that Flax's takes, by position too."""
    q, k, v = draw(2, 4, 4, 8), draw(2, 6, 2, 8, seed=1), draw(2, 6, 2, 8, seed=2)
    bias, mask = draw(2, 4, 4, 6, seed=3), draw(2, 1, 4, 6, seed=4) > 0
    for args, options, ops in [
        ((), {}, {"flash_attention"}),
        ((), {"is_causal": True}, {"flash_attention"}),
        ((None, None, True, None, 0.5, True, BF16), {}, {"flash_attention"}),
        ((bias, mask), {"is_causal": True}, {"flash_attention"}),
        ((), {"mask": mask.at[0, 0, 1].set(False)}, {"flash_attention"}),  # a query that sees nothing
        ((), {"precision": (jax.lax.Precision.HIGHEST,) * 2}, NONE),
        ((), {"dropout_rng": KEY, "dropout_rate": 0.5}, NONE),
    ]:
        f = lambda *x, a=args, o=options: jnnx.dot_product_attention(*x, *a, **o)
        agree(f(q, k, v), nnx.dot_product_attention(q, k, v, *args, **options), 0.03 if BF16 in args else 1e-5)
        assert ops_in(f, q, k, v) == ops
    # bottom-right where lengths differ, whatever is_causal says
    causal = (jnp.arange(6) <= jnp.arange(4)[:, None] + 2)[None, None]
    want = nnx.dot_product_attention(q, k, v, mask=causal)
    for options in ({}, {"is_causal": True}, {"mask": jnp.ones((2, 1, 1, 6))}):
        agree(jnnx.causal_attention(q, k, v, **options), want)
    for batch in ((), (2, 1)):
        arrays = [draw(*batch, 4, 2, 8, seed=i) for i in range(3)]
        agree(jnnx.dot_product_attention(*arrays, is_causal=True), nnx.dot_product_attention(*arrays, is_causal=True))


@pytest.mark.parametrize("options", [{}, {"attention_fn": jnnx.causal_attention}])
def test_decode(options):
    """Token by token with Flax's cache: what causal attention of the whole gives."""
    x = draw(*X)
    layer = jnnx.MultiHeadAttention(2, 8, num_kv_heads=1, rngs=rngs(), **options)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    out = [step(layer, x[:, i : i + 1]) for i in range(X[1])]
    agree(jnp.concatenate(out, 1), layer(x, decode=False, is_causal=True), 1e-4)


def test_sown_weights():
    x, sown = draw(*X), []
    for layers in (jnnx, nnx):
        layer = layers.MultiHeadAttention(2, 8, decode=False, rngs=rngs())
        layer(x, sow_weights=True)
        sown.append(nnx.to_pure_dict(nnx.pop(layer, nnx.Intermediate)))
    assert sown[0]["attention_weights"][0].shape == (2, 2, 6, 6)
    agree(*sown)


def test_rope():
    """Rotated queries and keys; positions of one's own; causal."""
    x, rope = draw(*X), nnx.RoPE(embedding_size=4, max_seq_len=16)
    layer, flax = (
        layers.MultiHeadAttention(
            2, 8, decode=False, rngs=rngs(), attention_fn=functools.partial(layers.dot_product_attention_with_rope, rope=rope)
        )
        for layers in (jnnx, nnx)
    )
    agree(layer(x, is_causal=True), flax(x, is_causal=True), 1e-4)
    agree(layer(x, input_positions=jnp.arange(6.0)), flax(x), 1e-4)
    f, state = functional(layer, is_causal=True)
    assert ops_in(f, state, x) == ATTENTION


def test_stands_in_for_flax():
    """from jtops import nnx: all else is there as well, and is Flax's own; signatures are shown."""
    assert jnnx.Module is nnx.Module
    assert jnnx.initializers is nnx.initializers
    assert {*dir(jnnx)} == {*(name for name in dir(nnx) if name[0] != "_"), *jnnx.__all__}
    for name in ("__path__", "no_such_layer"):
        with pytest.raises(AttributeError, match=f"'jtops.nnx' has no attribute '{name}', nor has 'flax.nnx'"):
            getattr(jnnx, name)
    for name in jnnx.__all__:
        if isinstance(getattr(nnx, name, None), type):
            assert list(inspect.signature(getattr(jnnx, name)).parameters) == list(inspect.signature(getattr(nnx, name)).parameters)
