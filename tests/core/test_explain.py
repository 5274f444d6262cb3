"""explain: what a call launches and why, told by lowering it, never by running it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtops
from jtops._compat.triton import tl, triton
from tests import programs


@triton.jit
def double_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


X = jnp.ones((16, 64))


@pytest.fixture(autouse=True)
def usual_launch():
    """Whatever path the test run asks for."""
    with jtops.config.launch(None):
        yield


def doubled(x, **kwargs):
    return jtops.triton_call(x, n=x.size, kernel=double_kernel, out_type=x, grid=(x.size // 256,), BLOCK=256, num_warps=8, **kwargs)


nested = programs.nested(jtops.add)


def test_a_named_target():
    with jtops.config.target("sm_90"):
        (launch,) = jtops.explain(doubled, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert (launch.name, launch.kernel, launch.target, launch.grid) == ("double_kernel", "double_kernel", "sm_90", (4, 1, 1))
    assert launch.constants == {"BLOCK": 256}
    assert (launch.options["num_warps"], launch.options["num_stages"]) == (8, 3)
    assert launch.path == "__gpu$xla.gpu.ptx"
    assert launch.shared_bytes == launch.spill_bytes == 0
    assert 0 < launch.registers < 64
    assert dataclasses.asdict(launch)["reason"] == "the program is for cuda"


def test_what_jit_scan_cond_and_custom_rules_hide():
    with jtops.config.target("sm_90"):
        found = jtops.explain(jax.grad(nested), X)
    names = {launch.name for launch in found}
    assert {"jtops_softmax_fwd", "jtops_softmax_vjp", "jtops_rms_norm_fwd", "jtops_rms_norm_vjp"} <= names
    assert {launch.target for launch in found} == {"sm_90"}
    forward = {launch.name for launch in jtops.explain(nested, X)}
    assert forward == {f"jtops_{op}_out" for op in ("softmax", "rms_norm", "layer_norm", "add")}


def test_the_cpu_says_that_references_run():
    def never(x):
        jax.debug.callback(lambda: pytest.fail("it was run"))
        return nested(x)

    for launch in jtops.explain(jax.grad(never), X):
        assert (launch.path, launch.target, launch.reason) == ("XLA", "cpu", "cpu runs no Triton kernels")
        assert launch.kernel is launch.grid is launch.shared_bytes is None


def test_settings_and_reasons():
    with jtops.config.interpret():
        softmax, double = jtops.explain(lambda x: doubled(jtops.softmax(x)), X)
    assert softmax.path == double.path == "interpreter"
    assert (double.grid, double.constants, double.registers) == ((4, 1, 1), {"BLOCK": 256}, None)
    assert "jtops_implementation" in double.reason
    for _ in range(2):  # JAX caches traces; what was traced before is told again
        (reference,) = jtops.explain(chosen, X, "xla")
        assert (reference.name, reference.path) == ("jtops_softmax", "XLA")
        assert 'implementation="xla"' in reference.reason
    with jtops.config.target("sm_90"):
        tangent = jtops.explain(lambda x: jax.jvp(jtops.softmax, (x,), (x,)), X)
        empty = jtops.explain(jtops.softmax, X[:0])
    assert "forward-mode" in next(launch.reason for launch in tangent if launch.path == "XLA")
    assert [launch.reason for launch in empty] == ["an array is empty"]
    assert jtops.explain(lambda x: x + 1, X) == ()


@functools.partial(jax.jit, static_argnums=1)
def chosen(x, implementation):
    return jtops.softmax(x, implementation=implementation)


def shared_out(x):
    return jtops.triton_call(
        x,
        n=lambda axes: axes["m"] * axes["n"],
        kernel=double_kernel,
        out_type=x,
        grid=lambda meta: jtops.cdiv(meta["m"] * meta["n"], 256),
        BLOCK=256,
        sharding_rule=jtops.ShardingRule("m n -> m n", split="m n"),
    )


def test_launch_paths():
    for asked, path in (("ptx", "__gpu$xla.gpu.ptx"), ("ffi", "triton_kernel_call_ffi")):
        with jtops.config.target("sm_90"), jtops.config.launch(asked):
            (launch,) = jtops.explain(doubled, X)
        assert launch.path == path
        assert launch.reason == f'the program is for cuda; jtops.config.launch("{asked}")'
    with jtops.config.target("sm_90"):
        (launch,) = jtops.explain(lambda x: doubled(x, zeroed_outputs=(0,)), X)
    assert launch.path == "triton_kernel_call_ffi"
    assert "not by XLA's own call: it has outputs to be zeroed" in launch.reason


def test_several_devices():
    kind, n = AxisType.Auto, 4
    mesh = jax.make_mesh((n,), ("x",), devices=jax.devices()[:n], axis_types=(kind,))
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    with jtops.config.interpret():
        (whole,) = jtops.explain(jax.jit(jtops.softmax), x)
        (own,) = jtops.explain(shared_out, x)
        (shard,) = jtops.explain(jax.shard_map(jtops.softmax, mesh=mesh, in_specs=P("x"), out_specs=P("x")), x)
    assert whole.path == own.path == "decided by XLA's partitioner"
    assert shard.path == "interpreter"


def test_prints_as_a_table():
    with jtops.config.target("sm_90"):
        text = str(jtops.explain(lambda x: doubled(jtops.softmax(x, implementation="xla")), X))
    head, rule, *rows = text.splitlines()
    assert head.split() == ["name", "kernel", "blocks", "options", "grid", "target", "path", "shared", "registers", "reason"]
    assert set(rule) == {"-"}
    assert len(rows) == 2
    assert re.search(r"double_kernel +double_kernel +BLOCK=256 +num_warps=8 num_stages=3 +4x1x1 +sm_90 +__gpu", rows[0])
    assert repr(jtops.explain(jnp.sin, X)).startswith("This call launches no kernel")


def test_errors_are_those_of_lowering():
    with pytest.raises(jtops.UnsupportedError, match="double_kernel: lowering for cpu, which runs no Triton kernels"):
        jtops.explain(doubled, X)
    with jtops.config.target("sm_90"):  # a failed explanation leaves nobody listening
        jax.jit(doubled).trace(X).lower(lowering_platforms=("cuda",))
    np.testing.assert_array_equal(doubled(X, interpret=True), 2 * X)
