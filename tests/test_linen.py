"""jtops.linen against flax.linen: the same parameters bit for bit, the same results up to rounding, and ops where they serve."""

import functools
import importlib
import sys

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtops
import jtops.linen as jnn
from tests import layers
from tests.layers import ATTENTION, BF16, F16, F32, PRODUCT, agree, draw, identical, ops_in, value_and_grads, way

KEY = jax.random.key(1, impl="unsafe_rbg")  # quicker to compile
SPREAD = nn.initializers.uniform(1.0)
NONE: set[str] = set()


def masked(mask):
    return {"mask": mask}


# layer, fields, options of the call, dtype of the input, ops that are to serve it
X = (2, 6, 8)
TOKENS = jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
RANDOM = {"scale_init": SPREAD, "bias_init": SPREAD}
NORM_TABLE = [
    ({}, {}, True),
    ({"epsilon": 0.1}, {}, True),
    ({"epsilon": np.float32(0.1)}, {}, True),
    ({"dtype": BF16}, {}, True),
    ({"dtype": F16, "param_dtype": BF16}, {}, True),
    ({"param_dtype": BF16}, {}, True),
    ({"use_scale": False}, {}, True),
    ({"use_fast_variance": False}, {}, True),
    ({"reduction_axes": (2,), "feature_axes": [-1]}, {}, True),
    ({"axis_index_groups": [[0]]}, {}, True),
    ({"reduction_axes": (1, 2)}, {}, False),
    ({"reduction_axes": 1}, {}, False),
    ({"feature_axes": (1, 2)}, {}, False),
    ({"force_float32_reductions": False}, {}, False),
    ({}, masked(draw(2, 6, 8) > -1.0), False),
]
CASES = (
    [("LayerNorm", RANDOM | fields, options, F32, {"layer_norm"} if served else NONE) for fields, options, served in NORM_TABLE]
    + [
        ("LayerNorm", {"use_bias": False, "scale_init": SPREAD}, {}, F32, {"layer_norm"}),
        ("LayerNorm", {"use_bias": False, "use_scale": False}, {}, BF16, {"layer_norm"}),
        ("LayerNorm", RANDOM, {}, BF16, {"layer_norm"}),
        ("LayerNorm", RANDOM | {"dtype": BF16}, {}, BF16, {"layer_norm"}),
        ("LayerNorm", RANDOM | {"param_dtype": BF16}, {}, BF16, {"layer_norm"}),
        ("LayerNorm", RANDOM | {"param_dtype": BF16}, {}, F16, {"layer_norm"}),
        ("LayerNorm", RANDOM, {}, jnp.int32, {"layer_norm"}),
        ("LayerNorm", {}, {}, jnp.complex64, NONE),
    ]
    + [
        ("RMSNorm", {"scale_init": SPREAD} | fields, options, F32, {"rms_norm"} if served else NONE)
        for fields, options, served in NORM_TABLE
    ]
    + [("RMSNorm", {"dtype": BF16, "scale_init": SPREAD}, {}, BF16, {"rms_norm"})]
    + [
        ("Dense", {"features": 5, "bias_init": SPREAD} | fields, {}, dtype, ops)
        for fields, dtype, ops in [
            ({}, F32, PRODUCT),
            ({}, BF16, PRODUCT),
            ({}, jnp.int32, PRODUCT),
            ({}, jnp.complex64, NONE),
            ({"use_bias": False}, F32, PRODUCT),
            ({"dtype": BF16}, F32, PRODUCT),
            ({"dtype": BF16}, BF16, PRODUCT),
            ({"param_dtype": BF16}, F32, PRODUCT),
            ({"kernel_init": SPREAD}, F32, PRODUCT),
            ({"precision": jax.lax.Precision.HIGHEST}, F32, PRODUCT),
            ({"precision": "highest"}, F32, PRODUCT),
            ({"precision": (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)}, F32, NONE),
            ({"promote_dtype": lambda x, kernel, bias, dtype: (x, kernel.astype(BF16).astype(F32), bias)}, F32, PRODUCT),
            ({"promote_dtype": lambda x, kernel, bias, dtype: (x.astype(BF16), kernel.astype(BF16), bias)}, F32, PRODUCT),
            ({"promote_dtype": lambda x, kernel, bias, dtype: (x.astype(BF16), kernel, bias)}, F32, NONE),
            ({"dot_general": jax.lax.dot_general}, F32, NONE),
            ({"dot_general": None}, F32, NONE),
            ({"dot_general_cls": lambda: jax.lax.dot_general}, F32, NONE),
        ]
    ]
    + [
        ("DenseGeneral", {"features": (3, 4), "bias_init": SPREAD} | fields, {}, dtype, ops)
        for fields, dtype, ops in [
            ({}, F32, PRODUCT),
            ({"dtype": BF16}, F32, PRODUCT),
            ({"param_dtype": BF16}, BF16, PRODUCT),
            ({"features": 5}, F32, PRODUCT),
            ({"axis": (-2, -1)}, F32, PRODUCT),
            ({"axis": (-1, -2)}, F32, PRODUCT),
            ({"axis": (0, 1, 2)}, F32, PRODUCT),
            ({"axis": (0, 2)}, F32, NONE),
            ({"axis": 1}, F32, NONE),
            ({"batch_dims": (0,)}, F32, PRODUCT),
            ({"batch_dims": (0, 1)}, F32, PRODUCT),
            ({"batch_dims": (0,), "axis": (-2, -1), "use_bias": False}, F32, PRODUCT),
            ({"dot_general": jax.lax.dot_general}, F32, NONE),
            ({"dot_general_cls": lambda: jax.lax.dot_general}, F32, NONE),
        ]
    ]
    + [
        (name, {"num_heads": 2, "bias_init": SPREAD} | fields, options, dtype, ops)
        for name, fields, options, dtype, ops in [
            ("MultiHeadDotProductAttention", {}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {}, {}, F32, ATTENTION),
            ("SelfAttention", {}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {"qkv_features": 12, "out_features": 5, "use_bias": False}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {"dtype": BF16}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {"dtype": BF16, "force_fp32_for_softmax": True}, {}, BF16, ATTENTION),
            ("MultiHeadAttention", {"param_dtype": BF16}, {}, BF16, ATTENTION),
            ("MultiHeadAttention", {"precision": jax.lax.Precision.HIGHEST}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {"out_kernel_init": SPREAD, "out_bias_init": SPREAD}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {"normalize_qk": True}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {"dropout_rate": 0.5, "deterministic": True}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {"dropout_rate": 0.5}, {"deterministic": True}, F32, ATTENTION),
            ("MultiHeadAttention", {"dropout_rate": 0.5}, {"deterministic": False, "dropout_rng": KEY}, F32, PRODUCT),
            ("MultiHeadAttention", {"dropout_rate": 0.5, "broadcast_dropout": False}, {"deterministic": False, "dropout_rng": KEY},
             F32, PRODUCT),
            ("MultiHeadAttention", {}, masked(nn.make_causal_mask(TOKENS)), F32, ATTENTION),
            ("MultiHeadAttention", {}, masked(nn.make_attention_mask(TOKENS > 0, TOKENS > 0)), F32, ATTENTION),
            ("SelfAttention", {}, masked(nn.make_causal_mask(TOKENS)), F32, ATTENTION),
            ("MultiHeadAttention", {"attention_fn": nn.dot_product_attention}, {}, F32, PRODUCT),
            ("MultiHeadAttention", {"qkv_dot_general": None, "out_dot_general": None}, {}, F32, {"flash_attention"}),
            ("MultiHeadAttention", {"qkv_dot_general_cls": lambda: jax.lax.dot_general}, {}, F32, ATTENTION),
            ("MultiHeadAttention", {"qk_attn_weights_einsum_cls": lambda: jnp.einsum,
                                    "attn_weights_value_einsum_cls": lambda: jnp.einsum}, {}, F32, PRODUCT),
        ]
    ]
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
@pytest.mark.parametrize(("name", "fields", "options", "dtype", "ops"), layers.options(CASES))
def test_every_option(name, fields, options, dtype, ops):
    x = draw(*X, dtype=dtype)
    theirs, ours = getattr(nn, name)(**fields), getattr(jnn, name)(**fields)
    assert isinstance(ours, getattr(nn, name))
    variables, mine = (layer.init({"params": KEY, "dropout": KEY}, x, **options) for layer in (theirs, ours))
    identical(mine, variables)
    want, got = (
        value_and_grads(f, variables, x) if ops else f(variables, x)
        for f in (functools.partial(layer.apply, **options) for layer in (theirs, ours))
    )
    agree(got, want, 0.03 if "promote_dtype" in fields else layers.shortest(variables, x, want))
    assert ops_in(functools.partial(ours.apply, **options), variables, x) == ops


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_the_kernel_itself(implementation):
    """The same by the kernels, interpreted; and, where the reference is asked for, without a primitive."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + jnn.MultiHeadAttention(num_heads=2, attention_fn=jnn.causal_attention)(jnn.LayerNorm()(x))
            return jnn.Dense(5)(jnn.RMSNorm(dtype=BF16)(x))

    model, x = Model(), draw(*X)
    variables = model.init(KEY, x)
    want = value_and_grads(model.apply, variables, x)
    with way(implementation):
        got = value_and_grads(jax.jit(model.apply), variables, x)
        served = ops_in(model.apply, variables, x)
    agree(got, want, 0.02)
    assert served == (NONE if implementation == "xla" else {"layer_norm", "rms_norm", "matmul", "flash_attention"})


def model_of(layers, *, causal, dtype=None, remat=False):
    """A small transformer as users write one, with layers of flax.linen or jtops.linen, and how Flax is told to be causal."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, mask=None):
            y = layers.LayerNorm(dtype=dtype)(x)
            y = layers.MultiHeadDotProductAttention(num_heads=2, dtype=dtype, **(causal if mask is None else {}))(y, mask=mask)
            x = x + y
            y = nn.gelu(layers.Dense(16, dtype=dtype)(layers.RMSNorm(dtype=dtype)(x)))
            return x + layers.DenseGeneral(8, dtype=dtype)(y)

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(11, 8, dtype=dtype)(tokens)
            mask = None if causal else nn.make_causal_mask(tokens)
            x = (nn.remat(Block) if remat else Block)()(x, mask)
            return layers.Dense(11, dtype=dtype)(layers.LayerNorm()(x))

    return Transformer()


CAUSAL = {"attention_fn": jnn.causal_attention}
TEXT = jnp.arange(12).reshape(2, 6) % 11


@pytest.mark.parametrize(("dtype", "remat"), [(None, True), pytest.param(BF16, False, marks=pytest.mark.slow)])
def test_swap_by_import(dtype, remat):
    """A model keeps its names, its initial values, and its results; and it takes checkpoints of Flax's."""
    theirs, ours = model_of(nn, causal={}, dtype=dtype, remat=remat), model_of(jnn, causal=CAUSAL, dtype=dtype, remat=remat)
    variables = theirs.init(KEY, TEXT)
    block = "CheckpointBlock_0" if remat else "Block_0"
    assert set(variables["params"][block]) == {
        "LayerNorm_0", "MultiHeadDotProductAttention_0", "RMSNorm_0", "Dense_0", "DenseGeneral_0"
    }  # fmt: skip
    identical(ours.init(KEY, TEXT), variables)
    saved = flax.serialization.to_bytes(variables)
    loaded = flax.serialization.from_bytes(ours.init(jax.random.key(2), TEXT), saved)
    got, want = (value_and_grads(model.apply, v, TEXT) for model, v in ((ours, loaded), (theirs, variables)))
    agree(got, want, 0.06 if dtype else 1e-4)
    assert ops_in(ours.apply, variables, TEXT) == {"layer_norm", "rms_norm", "matmul", "flash_attention"}


def test_orbax_checkpoint(tmp_path):
    """What Flax's model saved by orbax, ours restores, and the other way round."""
    theirs, ours = model_of(nn, causal={}), model_of(jnn, causal=CAUSAL)
    variables = theirs.init(KEY, TEXT)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", jax.eval_shape(ours.init, KEY, TEXT))
    identical(restored, variables)
    agree(ours.apply(restored, TEXT), theirs.apply(variables, TEXT), 1e-4)


def test_partitioning():
    """Boxed parameters: the same boxes, the same specs."""
    init = lambda *names: nn.with_partitioning(SPREAD, names)

    def variables(layers):
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = layers.LayerNorm(scale_init=init("embed"), bias_init=init("embed"))(x)
                x = layers.MultiHeadAttention(2, kernel_init=init("embed", "heads"), bias_init=init(None))(x)
                return layers.Dense(4, kernel_init=init("embed", "mlp"), bias_init=init("mlp"))(
                    layers.RMSNorm(scale_init=init(None))(x)
                )

        return Model().init(KEY, draw(*X)), Model()

    (want, theirs), (got, ours) = variables(nn), variables(jnn)
    identical(got, want)
    assert nn.get_partition_spec(got) == nn.get_partition_spec(want)
    agree(ours.apply(got, draw(*X)), theirs.apply(want, draw(*X)), 1e-4)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
def test_on_a_mesh(axis_type):
    """A batch on many devices: the same values and gradients as on one."""
    mesh = jax.make_mesh((4,), ("data",), (axis_type,))
    x = draw(4, 6, 8)
    layer = jnn.MultiHeadAttention(num_heads=2, attention_fn=jnn.causal_attention)
    norm = jnn.LayerNorm()
    variables = layer.init(KEY, x), norm.init(KEY, x)
    f = lambda variables, x: layer.apply(variables[0], norm.apply(variables[1], x))
    want = value_and_grads(f, variables, x)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P("data")))
        got = value_and_grads(jax.jit(f), jax.device_put(variables, NamedSharding(mesh, P())), split)
    agree(jax.device_get(got), jax.device_get(want), 1e-4)


def test_scan_and_vmap():
    """Layers stacked by nn.scan, and by nn.vmap."""

    class Step(nn.Module):
        layers: object

        @nn.compact
        def __call__(self, x, _):
            return x + self.layers.Dense(8)(self.layers.LayerNorm()(x)), None

    x = draw(*X)
    for lift in (
        nn.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2),
        nn.vmap(Step, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=(0, None)),
    ):
        theirs, ours = lift(nn), lift(jnn)
        variables = theirs.init(KEY, x, None)
        identical(ours.init(KEY, x, None), variables)
        got, want = (value_and_grads(lambda v, x, m=m: m.apply(v, x, None)[0], variables, x) for m in (ours, theirs))
        agree(got, want, 1e-4)


def test_axis_name():
    """Statistics over a mapped axis are Flax's."""
    x, f = (
        draw(*X),
        lambda layers: jax.vmap(
            lambda x: layers.LayerNorm(axis_name="i", use_bias=False, use_scale=False).apply({}, x), axis_name="i"
        ),
    )
    agree(f(jnn)(x), f(nn)(x))
    assert ops_in(f(jnn), x) == NONE


def test_traced_epsilon():
    """A traced epsilon is Flax's; a concrete one, of whatever type, is the op's."""
    f = lambda layers: lambda x, epsilon: layers.RMSNorm(epsilon=epsilon, use_scale=False).apply({}, x)
    x = draw(*X)
    agree(jax.jit(f(jnn))(x, 0.3), f(nn)(x, 0.3))
    agree(f(jnn)(x, jnp.asarray(0.3)), f(nn)(x, 0.3))
    assert ops_in(f(jnn), x, 0.3) == NONE
    assert ops_in(lambda x: f(jnn)(x, 0.3), x) == {"rms_norm"}


def test_variance_of_a_large_mean():
    """Where E[x^2] - E[x]^2 of Flax's default cancels to noise, two passes do not."""
    x = draw(4, 64) * 1e-2 + 300.0
    truth = np.asarray(x, np.float64)
    truth = (truth - truth.mean(-1, keepdims=True)) / np.sqrt(truth.var(-1, keepdims=True) + 1e-6)
    off = lambda layers: np.abs(np.asarray(layers.LayerNorm(use_scale=False, use_bias=False).apply({}, x)) - truth).max()
    assert off(jnn) < 1e-2 < off(nn)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_case_29_norms(name):
    """Case 29: parameters and their gradients stay float32 where a layer computes in bfloat16; it is the op; options count."""
    x, given = draw(*X), {"dtype": BF16, "param_dtype": F32, "scale_init": SPREAD}
    layer = getattr(jnn, name)(**given)

    @jax.jit
    def step(x):
        variables = layer.init(KEY, x)
        loss = lambda variables: ((layer.apply(variables, x).astype(F32) - 1.0) ** 2).sum()
        return layer.apply(variables, x), variables["params"], jax.grad(loss)(variables)["params"]

    y, params, grads = step(x)
    assert (y.dtype, y.shape) == (BF16, X)
    assert [(p.dtype, p.shape) for p in jax.tree.leaves((params, grads))] == [(F32, X[-1:])] * (2 * len(params))
    op = {"LayerNorm": jtops.layer_norm, "RMSNorm": jtops.rms_norm}[name]
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(op(x, **params).astype(BF16), np.float32))
    calls = lambda fields: lambda x: getattr(jnn, name)(**given | fields).init_with_output(KEY, x)
    bits = lambda tree: [np.asarray(v).tobytes() for v in jax.tree.leaves(tree)]
    seen = lambda fields: (str(jax.make_jaxpr(calls(fields))(x)), bits(calls(fields)(x)))
    usual = seen({})
    flips = {"epsilon": 0.1, "dtype": F16, "param_dtype": BF16, "use_scale": False, "scale_init": nn.initializers.ones,
             "reduction_axes": 0, "feature_axes": (1, 2), "force_float32_reductions": False}  # fmt: skip
    if name == "LayerNorm":
        flips |= {"use_bias": False, "bias_init": SPREAD}
    assert [option for option, value in flips.items() if seen({option: value}) == usual] == []


def attention(layers, x, *inputs, variables=None, init=(), **fields_and_options):
    names = {f for f in nn.MultiHeadAttention.__dataclass_fields__ if f in fields_and_options}
    layer = layers.MultiHeadAttention(num_heads=2, **{k: fields_and_options.pop(k) for k in names})
    variables = variables or layer.init(KEY, *(init or (x, *inputs)))
    return layer.apply(variables, x, *inputs, **fields_and_options)


def test_cross_attention():
    """Queries, keys and values of their own lengths and widths; no batch axis, and two."""
    for batch in ((2,), (), (2, 3)):
        inputs = draw(*batch, 4, 8), draw(*batch, 6, 10), draw(*batch, 6, 8)
        agree(attention(jnn, *inputs), attention(nn, *inputs), 1e-4)
        assert ops_in(lambda *x: attention(jnn, *x), *inputs) == ATTENTION


def test_causal():
    """causal_attention is the causal mask, and makes none; joined with a mask or dropout it is right as well."""
    x, mask = draw(*X), nn.make_causal_mask(TOKENS)
    agree(attention(jnn, x, **CAUSAL), attention(nn, x, mask=mask), 1e-4)
    text = str(jax.make_jaxpr(lambda x: attention(jnn, x, variables=jnn.MultiHeadAttention(2).init(KEY, x), **CAUSAL))(x))
    assert "6,6]" not in text
    padding = nn.make_attention_mask(TOKENS > 0, TOKENS > 0)
    agree(attention(jnn, x, mask=padding, **CAUSAL), attention(nn, x, mask=nn.combine_masks(mask, padding)), 1e-4)
    dropout = {"dropout_rate": 0.5, "deterministic": False, "dropout_rng": KEY}
    init = {"variables": nn.MultiHeadAttention(2).init(KEY, x)}
    identical(attention(jnn, x, **init, **dropout, **CAUSAL), attention(nn, x, mask=mask, **init, **dropout))
    # Flax's own layer takes it too.
    agree(attention(nn, x, **CAUSAL), attention(nn, x, mask=mask), 1e-4)


def test_attention_function():
    """The functions take every argument that Flax's takes, by position too, and refuse what it refuses."""
    q, k, v = draw(2, 4, 2, 8), draw(2, 6, 2, 8, seed=1), draw(2, 6, 2, 5, seed=2)
    bias, mask = draw(2, 2, 4, 6, seed=3), draw(2, 1, 4, 6, seed=4) > 0
    for args, options, ops in [
        ((), {}, {"flash_attention"}),
        ((None, None, True, None, 0.5, True, BF16), {}, {"flash_attention"}),
        ((bias,), {}, {"flash_attention"}),
        ((bias, mask), {"precision": "highest"}, {"flash_attention"}),
        ((), {"mask": mask.astype(F32).at[0, 0, 1].set(0)}, {"flash_attention"}),  # numbers, and a query that sees nothing
        ((), {"mask": mask.astype(int)[:, None]}, NONE),  # a batch axis that nothing else has
        ((), {"precision": (jax.lax.Precision.HIGHEST,) * 2}, NONE),
        ((), {"einsum_dot_general": jax.lax.dot_general}, NONE),
        ((), {"dropout_rng": KEY, "dropout_rate": 0.5}, NONE),
    ]:
        f = lambda *x, a=args, o=options: jnn.dot_product_attention(*x, *a, **o)
        agree(f(q, k, v), nn.dot_product_attention(q, k, v, *args, **options), 0.03 if BF16 in args else 1e-5)
        assert ops_in(f, q, k, v) == ops
    with pytest.raises(TypeError, match="is_causal"):
        jnn.dot_product_attention(q, k, v, is_causal=True)
    # bottom-right where lengths differ
    causal = jnp.arange(6) <= jnp.arange(4)[:, None] + 2
    want = nn.dot_product_attention(q, k, v, mask=causal)
    agree(jnn.causal_attention(q, k, v), want)
    agree(jnn.causal_attention(q, k, v, mask=jnp.ones((2, 1, 1, 6))), want)


@pytest.mark.parametrize("causal", [{}, CAUSAL])
def test_decode(causal):
    """Token by token with Flax's cache: what causal attention of the whole gives."""
    x = draw(*X)
    layer = jnn.MultiHeadAttention(num_heads=2, decode=True, **causal)
    variables = layer.init(KEY, x)
    identical(variables, nn.MultiHeadAttention(num_heads=2, decode=True).init(KEY, x))
    step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))
    params, cache, out = variables["params"], variables["cache"], []
    for i in range(X[1]):
        y, updated = step({"params": params, "cache": cache}, x[:, i : i + 1])
        cache = updated["cache"]
        out.append(y)
    whole = layer.clone(decode=False, **CAUSAL).apply({"params": params}, x)
    agree(jnp.concatenate(out, 1), whole, 1e-4)


def test_sown_weights_and_intermediates():
    """Attention weights, and what capture_intermediates and tabulate see, are as Flax's: each layer once."""
    x = draw(*X)
    sown = [attention(layers, x, sow_weights=True, mutable=["intermediates"])[1] for layers in (jnn, nn)]
    agree(*sown)
    got, want = (
        model_of(layers, causal=causal).apply(
            model_of(nn, causal={}).init(KEY, TEXT), TEXT, capture_intermediates=True, mutable=["intermediates"]
        )[1]
        for layers, causal in ((jnn, CAUSAL), (nn, {}))
    )
    agree(got, want, 1e-4)
    tables = [nn.tabulate(layers.RMSNorm(reduction_axes=axes), KEY)(x) for layers in (jnn, nn) for axes in (-1, 1)]
    assert len(set(tables)) == 1


@pytest.mark.parametrize(
    ("lhs", "rhs", "numbers", "served"),
    [
        ((4, 3), (3, 5), (((1,), (0,)), ((), ())), True),
        ((3,), (3, 5), (((0,), (0,)), ((), ())), True),
        ((4, 3), (3,), (((1,), (0,)), ((), ())), True),
        ((2, 4, 3), (3, 5, 6), (((2,), (0,)), ((), ())), True),
        ((2, 4, 3), (4, 3, 5), (((1, 2), (0, 1)), ((), ())), True),
        ((2, 4, 3), (2, 3, 5), (((2,), (1,)), ((0,), (0,))), True),
        ((2, 4, 6, 3), (2, 3, 5, 7), (((3,), (1,)), ((0,), (0,))), True),
        ((2, 4, 3), (2, 4, 3, 5), (((2,), (2,)), ((0, 1), (0, 1))), True),
        ((0, 3), (3, 5), (((1,), (0,)), ((), ())), True),
        ((4, 0), (0, 5), (((1,), (0,)), ((), ())), True),
        ((4, 3), (5, 3), (((1,), (1,)), ((), ())), False),
        ((3, 4), (3, 5), (((0,), (0,)), ((), ())), False),
        ((2, 4, 3), (3, 4, 5), (((1, 2), (1, 0)), ((), ())), False),
        ((4, 2, 3), (2, 3, 5), (((2,), (1,)), ((1,), (0,))), False),
        ((4, 3), (5, 6), (((), ()), ((), ())), False),
    ],
)
def test_dot_general(lhs, rhs, numbers, served):
    a, b = draw(*lhs), draw(*rhs, seed=1)
    f = lambda a, b: jnn.dot_general(a, b, numbers)
    agree(f(a, b), jax.lax.dot_general(a, b, numbers), 1e-5)
    assert ops_in(f, a, b) == (PRODUCT if served else NONE)
    assert jnn.dot_general(a.astype(BF16), b.astype(BF16), numbers, preferred_element_type=F32).dtype == F32
    assert ops_in(f, a, b.astype(BF16)) == NONE
    identical(jnn.dot_general(a.astype(int), b.astype(int), numbers), jax.lax.dot_general(a.astype(int), b.astype(int), numbers))


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_without_flax(name, monkeypatch):
    monkeypatch.delitem(sys.modules, f"jtops.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match=rf'jtops\.{name} needs Flax 0\.12: pip install "flax==0\.12\.\*"'):
        importlib.import_module(f"jtops.{name}")


def test_stands_in_for_flax():
    """import jtops.linen as nn: all else is there as well, and is Flax's own; but it is no package."""
    assert jnn.Module is nn.Module
    assert jnn.make_causal_mask is nn.make_causal_mask
    assert {*dir(jnn)} == {*(name for name in dir(nn) if name[0] != "_"), *jnn.__all__}
    for name in ("__path__", "_private", "no_such_layer"):
        with pytest.raises(AttributeError, match=f"'jtops.linen' has no attribute '{name}', nor has 'flax.linen'"):
            getattr(jnn, name)


def test_submodules_are_flaxs(monkeypatch):
    """flax.linen does not import all of its submodules: from jtops.linen import partitioning is to do so."""
    monkeypatch.delattr(nn, "partitioning", raising=False)
    monkeypatch.delitem(sys.modules, "flax.linen.partitioning", raising=False)
    assert jnn.partitioning.__name__ == "flax.linen.partitioning"
