"""A user's own kernel on meshes: right values on all three kinds of axes, and no collective that the rule does not ask for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jtops
from jtops._compat.triton import tl, triton
from jtops.core.interpret import host_call
from tests.kernels.test_sharding import COLLECTIVE, devices, mesh, put

everywhere = pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.multigpu)])


@triton.jit
def center_kernel(x_ptr, w_ptr, o_ptr, m_ptr, n, x_batch, w_batch, o_batch, m_batch, BLOCK: tl.constexpr):
    """Row r: o = (x - mean(x)) * w, m = mean(x)."""
    b, row = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + b * x_batch + row * n + i, mask=i < n, other=0.0)
    mean = tl.sum(x) / n
    tl.store(o_ptr + b * o_batch + row * n + i, (x - mean) * tl.load(w_ptr + b * w_batch + i, mask=i < n), mask=i < n)
    tl.store(m_ptr + b * m_batch + row, mean)


RULE = jtops.ShardingRule("rows n, n -> rows n, rows", split="rows")
METHOD = jtops.GridBatch(axis=1, strides={f"{a}_ptr": f"{a}_batch" for a in "xwom"})


def local(x, w, interpret=True):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], x.dtype)
    return jtops.triton_call(
        x, w, n=x.shape[1], kernel=center_kernel, BLOCK=32, out_type=out, grid=x.shape[0], interpret=interpret, vmap_method=METHOD
    )  # fmt: skip


def by_keyword(x, w, interpret=True):
    return jtops.triton_call(
        x,
        w,
        n=lambda axes: axes["n"],
        kernel=center_kernel,
        BLOCK=32,
        out_type=(x, jax.ShapeDtypeStruct(x.shape[:1], x.dtype)),
        grid=lambda meta: meta["rows"],
        interpret=interpret,
        vmap_method=METHOD,
        sharding_rule=RULE,
    )


def interpreted(x, w):
    return local(x, w)


def native(x, w):
    return local(x, w, interpret=False)


BY_FUNCTION = {True: jtops.sharded_call(interpreted, RULE), False: jtops.sharded_call(native, RULE)}


def center(form, interpret):
    return BY_FUNCTION[interpret] if form == "function" else functools.partial(by_keyword, interpret=interpret)


forms = pytest.mark.parametrize("form", ["function", "keyword"])


def wanted(x, w):
    mean = x.mean(1)
    return (x - mean[:, None]) * w, mean


def close(got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


def run(f, *args):
    """Results, and the collectives of the program that made them."""
    compiled = f.lower(*args).compile()
    return compiled(*args), set(COLLECTIVE.findall(compiled.as_text()))


X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 24)), jnp.float32)
W = jnp.linspace(1.0, 2.0, 24)


@everywhere
@pytest.mark.spec("vmap_method and sharding_rule")
@forms
def test_automatic_axes(form, interpret):
    f = jax.jit(center(form, interpret))
    x = put(X, mesh(), "x")
    got, moved = run(f, x, W)
    close(got, wanted(X, W))
    assert got[0].sharding.is_equivalent_to(x.sharding, 2)
    assert moved == set()
    close(f(X, W), wanted(X, W))  # on one device


@everywhere
def test_what_is_not_split_is_gathered(interpret):
    f = jax.jit(center("function", interpret))
    for x, w in ((put(X, mesh(), None, "x"), W), (put(X, mesh(), "x"), put(W, mesh(), "x"))):
        got, moved = run(f, x, w)
        close(got, wanted(X, W))
        assert moved == {"all-gather"}
    odd = X[: 2 * devices() - 1]  # rows that the mesh does not divide
    close(jax.jit(lambda x, w: f(jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh(), P("x"))), w))(odd, W),
          wanted(odd, W))  # fmt: skip


@everywhere
@pytest.mark.spec("vmap_method and sharding_rule")
@forms
def test_explicit_axes(form, interpret):
    f, m = center(form, interpret), mesh(AxisType.Explicit)
    with jax.set_mesh(m):
        x = put(X, m, "x")
        close(f(x, W), wanted(X, W))
        jitted = jax.jit(f)
        got, moved = run(jitted, x, W)
        close(got, wanted(X, W))
        assert [o.sharding.spec for o in got] == [P("x", None), P("x")]
        assert moved == set()
        close(jitted(put(X, m, None, "x"), W), wanted(X, W))
        texts = {jax.jit(center(form, interpret)).lower(x, W).as_text() for _ in range(2)}
        assert len(texts) == 1
        assert "CustomSPMD" not in texts.pop()


@everywhere
@pytest.mark.spec("vmap_method and sharding_rule")
@forms
def test_manual_axes(form, interpret):
    f = jax.jit(jax.shard_map(center(form, interpret), mesh=mesh(), in_specs=(P("x"), P()), out_specs=P("x")))
    got, moved = run(f, X, W)
    close(got, wanted(X, W))
    assert moved == set()
    if devices() > 1:
        two = mesh(names=("a", "b"))
        part = jax.shard_map(
            center(form, interpret), mesh=two, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"}, check_vma=False
        )
        with pytest.raises(jtops.UnsupportedError, match=r"every mesh axis must be manual.*Give shard_map all axis_names"):
            jax.jit(part)(X, W)


@everywhere
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)])
def test_vmap_may_split_what_it_maps(kind, interpret):
    """The batch is an axis of the rule; shared operands stay shared; the kernel's own vmap_method serves each device."""
    xs = jnp.stack([X + i for i in range(8)])
    f, m = jax.jit(jax.vmap(center("function", interpret), (0, None))), mesh(kind)
    with jax.set_mesh(m):
        for spec in (("x",), (None, "x")):
            x = put(xs, m, *spec)
            got, moved = run(f, x, W)
            close(got, jax.vmap(wanted, (0, None))(xs, W))
            assert moved == set()
    nested = jax.jit(jax.vmap(jax.vmap(center("function", interpret), (0, None)), (None, 0)))
    ws = jnp.stack([W, W + 1])
    close(nested(put(xs, mesh(), "x"), ws), jax.vmap(jax.vmap(wanted, (0, None)), (None, 0))(xs, ws))


def test_lowered_and_exported_for_a_gpu():
    """Explicit axes: the launch is of a device's part, and the program holds no address."""
    m = mesh(AxisType.Explicit)
    with jax.set_mesh(m), jtops.config.target("sm_90"):
        f = jax.jit(center("keyword", False))
        exported = jax.export.export(f, platforms=("cuda",), disabled_checks=jtops.export_checks)(put(X, m, "x"), W)
    assert "(tensor<2x24xf32>, tensor<24xf32>) -> (tensor<2x24xf32>, tensor<2xf32>)" in exported.mlir_module()
    assert jax.export.deserialize(exported.serialize()).nr_devices == 8


def test_settings_are_those_of_the_call():
    """The program may be compiled after the block that set them."""
    plain = jtops.sharded_call(functools.partial(local, interpret=None), RULE)
    with jtops.config.interpret():
        traced = jax.jit(plain).trace(put(X, mesh(), "x"), W)
    close(traced.lower().compile()(put(X, mesh(), "x"), W), wanted(X, W))
    with pytest.raises(jtops.UnsupportedError, match=r"center_kernel: lowering for cpu.*Pass interpret=True"):
        jax.jit(plain)(put(X, mesh(), "x"), W)


def test_eager_calls_compile_once():
    """Equal calls are equal, whatever objects say them."""
    grid, n = (lambda meta: meta["rows"]), (lambda axes: axes["n"])
    call = lambda: jtops.triton_call(
        X, W, n=n, kernel=center_kernel, BLOCK=32, out_type=(X, X[:, 0]), grid=grid, interpret=True, sharding_rule=RULE,
        cost_estimate={"flops": 3}, **dict.fromkeys(["x_batch", "w_batch", "o_batch", "m_batch"], 0),
    )  # fmt: skip
    made = [jax.make_jaxpr(call)().eqns[-1].params["call"] for _ in range(2)]
    assert made[0] == made[1]
    assert hash(made[0]) == hash(made[1])


FACTOR = 1


def test_eager_calls_with_functions_made_anew(monkeypatch):
    """Case 66: the call is lowered once, whoever makes its functions; a value that they see makes another call."""
    calls = lambda f: [jax.make_jaxpr(f)(X, W).eqns[-1].params["call"] for _ in range(2)]
    one, same = calls(by_keyword)
    assert one == same
    assert hash(one) == hash(same)
    by_keyword(X, W)
    monkeypatch.setattr(host_call, "lower", None)  # nothing asks for it
    by_keyword(X, W)

    def scaled(x, w, factor):
        return jtops.triton_call(
            x, w, n=lambda axes: axes["n"] * factor * FACTOR, kernel=center_kernel, BLOCK=32, out_type=(X, X[:, 0]), interpret=True,
            grid=lambda meta: meta["rows"], sharding_rule=RULE, **dict.fromkeys(["x_batch", "w_batch", "o_batch", "m_batch"], 0),
        )  # fmt: skip

    global FACTOR  # noqa: PLW0603
    first = calls(functools.partial(scaled, factor=1))[0]
    assert first == calls(functools.partial(scaled, factor=1))[0]
    assert first != calls(functools.partial(scaled, factor=True))[0]
    FACTOR = 2
    assert first != calls(functools.partial(scaled, factor=1))[0]
    FACTOR = 1


@pytest.mark.parametrize(
    ("axes", "split", "match"),
    [
        ("b n", "", r'axes .b n. must be like "b n, n -> b n"'),
        ("b n -> ", "", "must be like"),
        ("b n -> b", "n", "axis 'n' of split must be in every result .* needs it whole"),
        ("n -> b n", "b", "axis 'b' of split must be .* in some operand"),
        ("b n -> b n", "k", "axis 'k' of split"),
    ],
)
def test_malformed_rules(axes, split, match):
    with pytest.raises(ValueError, match=match):
        jtops.ShardingRule(axes, split)


def test_errors():
    f = center("function", True)
    with pytest.raises(ValueError, match=r"does not fit operands of shapes \(24,\), \(24,\)"):
        f(W, W)
    with pytest.raises(ValueError, match=r"axis n has sizes 24 and 23 in operands of shapes \(16, 24\), \(23,\)"):
        f(X, W[1:])
    with pytest.raises(ValueError, match=r"interpreted: sharding rule .* does not fit results of shapes \(16, 24\), \(16,\) for"):
        jtops.sharded_call(interpreted, jtops.ShardingRule("rows n, n -> rows n", "rows"))(X, W)
    with pytest.raises(TypeError, match=r"sharding_rule must be a jtops.ShardingRule.*got 'rows n -> rows n'"):
        jtops.sharded_call(interpreted, "rows n -> rows n")
    with pytest.raises(TypeError, match=r"grid must be a function.*got 16"):
        jtops.triton_call(X, W, kernel=center_kernel, out_type=X, grid=16, sharding_rule=RULE)
    with pytest.raises(ValueError, match="does not fit out_type"):
        jtops.triton_call(X, W, kernel=center_kernel, out_type=X, grid=lambda meta: 16, sharding_rule=RULE)
    with pytest.raises(ValueError, match=r"center_kernel: sharding rule .* does not fit results of shapes \(16, 23\), \(16,\) for"):
        jtops.triton_call(X, W, kernel=center_kernel, out_type=(X[:, 1:], X[:, 0]), grid=lambda meta: 16, sharding_rule=RULE)
    described = jtops.TensorDescriptor.from_array(X, (4, 8))  # of all rows, where a device has two
    with pytest.raises(jtops.UnsupportedError, match=r"a TensorDescriptor has the shape of the whole array.*jtops.sharded_call"):
        jtops.triton_call(described, W, kernel=center_kernel, out_type=(X, X[:, 0]), grid=lambda meta: 16, sharding_rule=RULE)
    with pytest.raises(TypeError, match=r"'BLOCKS' is neither .* Did you mean 'BLOCK'"):
        jtops.triton_call(X, W, kernel=center_kernel, out_type=(X, X[:, 0]), grid=lambda meta: 16, sharding_rule=RULE, BLOCKS=[1])
    with pytest.raises(
        NotImplementedError, match=r"interpreted: a sharded call of kernels has no derivative. Wrap it in jax.custom"
    ):
        jax.grad(lambda x: f(x, W)[0].sum())(X)


def test_without_a_rule_the_error_says_how():
    """Explicit axes are in the types; what automatic axes shard, XLA gathers for a kernel without a rule."""
    m = mesh(AxisType.Explicit)
    with jax.set_mesh(m):
        with pytest.raises(jtops.UnsupportedError, match=r"center_kernel: operand 0 is sharded.*sharding_rule=jtops.ShardingRule"):
            jax.jit(local)(put(X, m, "x"), W)
        close(jax.jit(local)(put(X, m), W), wanted(X, W))
    close(jax.jit(local)(put(X, mesh(), "x"), W), wanted(X, W))
