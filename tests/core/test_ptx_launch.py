"""The two launch paths: the same calls give the same values, and the program's text says which it is."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

import jtops
from jtops._compat import jax as jax_compat
from jtops._compat.triton import tl, triton
from jtops.core.compile.kernel import CompiledKernel
from jtops.core.launch import ptx as ptx_launch
from jtops.core.types import Parameter, as_scalar
from tests.kernels import lowered, resources

TARGET = "__gpu$xla.gpu.ptx"
paths = pytest.mark.parametrize("path", ["ffi", "ptx"])


@triton.jit
def affine_kernel(x_ptr, o_ptr, s_ptr, n, factor, wide, flag, BLOCK: tl.constexpr = 256):
    """o = x * factor + wide if flag, else x; s = the number of the block."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(o_ptr + i, tl.where(flag, x * factor + wide.to(tl.float32), x), mask=i < n)
    tl.store(s_ptr + tl.program_id(0), tl.program_id(0))


@triton.jit
def add_one_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr = 256):
    """x += y, in place."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) + tl.load(y_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def transpose_kernel(x_ptr, o_ptr, N: tl.constexpr):
    """Shared memory, several warps."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(o_ptr + i * N + j, tl.trans(tl.load(x_ptr + i * N + j)))


@triton.jit
def loop_kernel(x_ptr, o_ptr, n):
    i = tl.arange(0, 64)
    x = tl.load(x_ptr + i)
    for _ in range(n):
        x = tl.sin(x)
    tl.store(o_ptr + i, x)


def affine(x, factor=0.1, wide=2**40, flag=True, **kwargs):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((2,), jnp.int32)
    return jtops.triton_call(
        x, n=x.size, factor=factor, wide=wide, flag=flag, kernel=affine_kernel, out_type=out, grid=2, **kwargs
    )  # fmt: skip


def add_in_place(x, y, **kwargs):
    return jtops.triton_call(
        x, y, n=x.size, kernel=add_one_kernel, out_type=x, grid=2, input_output_aliases={0: 0}, **kwargs
    )  # fmt: skip


X = jnp.arange(300.0)
fresh = functools.partial  # of a function: one that JAX has not lowered yet


def lowered_by(path, f, *args, **how):
    with jtops.config.launch(path):
        return lowered.text(f, *args, **how)


def kernel_of(text: str) -> str:
    """The PTX in the text of a program, read as XLA reads it."""
    (config,) = re.findall(r'backend_config = "((?:[^"\\]|\\.)*)"', text)
    config = re.sub(r"\\([0-9A-F]{2}|\\)", lambda m: "\\" if m[1] == "\\" else chr(int(m[1], 16)), config)
    with ir.Context():
        return ir.StringAttr(ir.DictAttr(ir.Attribute.parse(config))["kernel_data"]).value


def pointers(ptx: str) -> int:
    return re.search(r"\.entry.*?\)", ptx, re.DOTALL)[0].count(".param")


# ------------------------------------------------------------------------------------------------------------- on any host


def assert_assembles(compiled, ptx):
    """What is known of a number may change how many registers are used, but not what the kernel does with memory."""
    got, plain = resources.of(dataclasses.replace(compiled, binary=ptx)), resources.of(compiled)
    assert [got[k] for k in ("spill_bytes", "shared_bytes")] == [plain[k] for k in ("spill_bytes", "shared_bytes")]


@pytest.mark.spec("two launch paths, byte-stable lowered text")
def test_text_is_stable_and_says_which_path():
    """The setting is part of jit's key; each path's text is the same every time; layouts are row-major."""
    f = jax.jit(affine)
    texts = {path: lowered_by(path, f, X) for path in ("ffi", "ptx", None)}
    assert texts[None] == texts[ptx_launch.AUTOMATIC]
    assert TARGET in texts["ptx"]
    assert "triton_kernel_call_ffi" not in texts["ptx"]
    assert texts["ptx"] == lowered_by("ptx", jax.jit(affine), X)
    shape = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    text = lowered_by("ptx", lambda x: jtops.triton_call(x, kernel=transpose_kernel, N=32, out_type=x, grid=1), shape)
    assert "operand_layouts = [dense<[1, 0]> : tensor<2xindex>], result_layouts = [dense<[1, 0]>" in text


@pytest.mark.spec("two launch paths, byte-stable lowered text")
def test_numbers_become_immediates_and_unread_parameters_go():
    text = lowered_by("ptx", lambda x: affine(x, name="mine", cost_estimate={"flops": 600}), X)
    assert "-> (tensor<300xf32>, tensor<2xi32>)" in text
    assert r"launch_name = \22mine\22" in text
    with jtops.config.launch("ptx"):
        assert lowered.launches(fresh(affine, name="mine"), X) == {"mine": 1}
    assert "grid_x = 2 : i32, grid_y = 1 : i32, grid_z = 1 : i32, block_x = 128 : i32" in text
    ptx = kernel_of(text)
    assert pointers(ptx) == 3
    given = {"b32": [(300, "i4"), (0.1, "f4")], "b64": [(2**40, "i8")], "b16": [(True, "i2")]}
    for kind, numbers in given.items():
        moved = re.findall(rf"mov\.{kind}\s+%\w+,(0x\w+);", ptx)
        assert {f"{int.from_bytes(np.array(*number).tobytes(), 'little'):#x}" for number in numbers} <= set(moved)
    assert "ld.const" not in ptx
    assert ptx.count("ld.param") == 3  # the pointers
    (compiled,) = lowered.kernels(fresh(affine), X)
    assert_assembles(compiled, ptx)


def test_large_kernels_assemble():
    """A real op: shared memory, loops, 8 warps."""
    a = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    with jtops.config.launch("ptx"):
        f = lambda: (
            lambda a, b: jtops.matmul(a, b, activation="gelu", implementation="triton")
        )  # a new one: JAX keeps what it lowered
        ptx = kernel_of(text := lowered.text(f(), a, a))
        jax.clear_caches()
        (compiled,) = lowered.kernels(f(), a, a)
    assert f"shared_mem_bytes = {compiled.shared_bytes} : i32" in text
    assert f"block_x = {32 * compiled.num_warps} : i32" in text
    assert_assembles(compiled, ptx)


def test_quotes_survive():
    """Loops that Triton must not unroll say so in quotes."""
    f = lambda x: jtops.triton_call(x, kernel=loop_kernel, n=40, out_type=x, grid=1)
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    ptx = kernel_of(lowered_by("ptx", fresh(f), x))
    assert '.pragma "nounroll";' in ptx
    (compiled,) = lowered.kernels(fresh(f), x)
    assert_assembles(compiled, ptx)


def test_aliased_results_come_last():
    """They have no pointer in the kernel; the buffer that XLA hands over for them has a parameter that nobody reads."""
    text = lowered_by("ptx", add_in_place, X, X)
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 0" in text
    ptx = kernel_of(text)
    assert pointers(ptx) == 3
    assert "add_one_kernel_result_0" in ptx
    (compiled,) = lowered.kernels(fresh(add_in_place), X, X)
    assert_assembles(compiled, ptx)


CALL = SimpleNamespace(name="k", launch="ptx", zeroed=(), metadata=b"", aliases=())
NUMBER = Parameter((0,), "n", as_scalar(3), "i32", aligned=False, folds=False)
DESCRIPTOR = dataclasses.replace(NUMBER, value="descriptor")
PTX = ".version 8.7\n.visible .entry k(\n\t.param .u32 k_param_0,\n\t.param .u64 k_param_1\n)\n{\n\tBODY\n\tret;\n}\n"


def compiled_as(body=".reg .b32 \t%r<2>;\n\tld.param.b32 \t%r1, [k_param_0];", **changes):
    given = {f.name: None for f in dataclasses.fields(CompiledKernel)} | {"folded": frozenset(), "num_ctas": 1}
    given |= {"target": SimpleNamespace(platform="cuda"), "binary": PTX.replace("BODY", body)} | changes
    return CompiledKernel(**given)


@pytest.mark.parametrize(
    ("call", "compiled", "parameters", "reason"),
    [
        ({}, {"num_ctas": 2}, (NUMBER,), "it runs in clusters of 2"),
        ({}, {"target": SimpleNamespace(platform="rocm")}, (NUMBER,), "it is for ROCm"),
        ({"metadata": b"any"}, {}, (NUMBER,), "it carries metadata"),
        ({"zeroed": (0,)}, {}, (NUMBER,), "it has outputs to be zeroed"),
        ({}, {}, (DESCRIPTOR,), "it takes tensor descriptors"),
        ({}, {"body": "ld.param.b64 \t%rd1, [k_param_1];"}, (NUMBER,), "it uses scratch memory"),
        ({}, {"body": "mov.b64 \t%rd1, k_param_0;"}, (NUMBER,), "uses the number k_param_0 in another way than loading it"),
        ({}, {}, (NUMBER,) * 3, "does not declare the 3 parameters"),
        ({}, {"binary": "no kernel"}, (NUMBER,), "does not declare the 1 parameters"),
    ],
)
def test_kernels_that_do_not_fit(call, compiled, parameters, reason):
    """Demanded, it is an error that says why; left to the library, the other path serves the kernel."""
    asked = SimpleNamespace(**vars(CALL) | call)
    assert ptx_launch.chosen(CALL, (NUMBER,), compiled_as(), 0)[0] is not None
    with pytest.raises(jtops.UnsupportedError, match=rf'kernel k: jtops.config.launch\("ptx"\) was asked for, but .*{reason}'):
        ptx_launch.chosen(asked, parameters, compiled_as(**compiled), 0)
    asked.launch = None
    text, why = ptx_launch.chosen(asked, parameters, compiled_as(**compiled), 0)
    assert text is None
    assert reason in why
    asked.launch = "ffi"
    assert ptx_launch.chosen(asked, parameters, compiled_as(**compiled), 0) == (None, None)


def test_an_xla_without_the_call(monkeypatch):
    """XLA is asked once; that of the CPU stands in for one that lacks the call."""
    here = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda backend: here)
    assert "No registered implementation" in jax_compat.ptx_call_refused(f"{TARGET}.absent")
    monkeypatch.undo()
    assert jax_compat.ptx_call_refused(f"{TARGET}.unasked") is None  # no such GPU here: the program is for elsewhere
    monkeypatch.setattr(jax_compat, "ptx_call_refused", lambda target: f"no custom call {target}")
    with pytest.raises(jtops.UnsupportedError, match="this process' XLA refuses the call: no custom call __gpu"):
        lowered_by("ptx", fresh(affine), X)
    assert "triton_kernel_call_ffi" in lowered_by(None, fresh(affine), X)


@paths
def test_exports(path):
    name = {"ffi": "triton_kernel_call_ffi", "ptx": TARGET}[path]
    with jtops.config.launch(path), jtops.config.target("sm_90"):
        checks = [jax.export.DisabledSafetyCheck.custom_call(name)]
        exported = jax.export.export(jax.jit(affine), platforms=("cuda",), disabled_checks=checks)(X)
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert again.mlir_module_serialized == exported.mlir_module_serialized


def test_the_setting():
    with (
        pytest.raises(ValueError, match=r"jtops_launch .* must be None or one of 'ffi', 'ptx'; got 'xla'"),
        jtops.config.launch("xla"),
    ):
        pass
    assert jtops.config.launch.value is None


# --------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.spec("two launch paths, byte-stable lowered text")
@paths
def test_values(path):
    with jtops.config.launch(path):
        for given in ({}, {"factor": -2.5, "wide": 2**33}, {"factor": 1.0, "flag": False}, {"wide": -(2**35)}):
            factor, wide, flag = ({"factor": 0.1, "wide": 2**40, "flag": True} | given).values()
            o, s = jax.jit(lambda x: affine(x, **given))(X)
            want = np.float32(factor) * np.asarray(X) + np.float32(wide) if flag else X
            np.testing.assert_allclose(o, want, rtol=1e-6)
            np.testing.assert_array_equal(s, [0, 1])
        square = jax.random.normal(jax.random.key(0), (128, 128))
        turn = lambda x: jtops.triton_call(x, kernel=transpose_kernel, N=128, out_type=x, grid=1, num_warps=8)
        np.testing.assert_array_equal(jax.jit(turn)(square), square.T)
        np.testing.assert_array_equal(jax.jit(lambda x: turn(x.T * 1))(square), square)  # row-major, whatever XLA would like
        np.testing.assert_array_equal(jax.jit(lambda x: turn(turn(x)) + 1)(square), square + 1)


@pytest.mark.gpu
@paths
def test_chain_of_launches(path):
    """More than a hundred launches in one program, which XLA makes a CUDA graph of."""

    def chain(x):
        for _ in range(120):
            x = affine(x, flag=False)[0] + 1.0
        return x

    with jtops.config.launch(path):
        f, x = jax.jit(chain), jnp.zeros(300)
        for _ in range(3):
            np.testing.assert_allclose(f(x), np.full(300, 120.0))


@pytest.mark.gpu
@paths
def test_in_place(path):
    """An aliased operand is changed where it lies if it is donated, and copied first if not."""
    with jtops.config.launch(path):
        y = jnp.ones(300)
        np.testing.assert_array_equal(jax.jit(add_in_place)(X, y), X + 1)
        np.testing.assert_array_equal(X, np.arange(300.0))
        x = X + 0
        at = x.unsafe_buffer_pointer()
        got = jax.jit(add_in_place, donate_argnums=0)(x, y)
        assert got.unsafe_buffer_pointer() == at
        assert x.is_deleted()
        np.testing.assert_array_equal(got, X + 1)


@pytest.mark.gpu
@paths
def test_op_with_much_shared_memory(path):
    a, b = (jax.random.normal(jax.random.key(i), (512, 512), jnp.bfloat16) for i in (0, 1))
    with jtops.config.launch(path):
        got = jax.jit(lambda a, b: jtops.matmul(a, b, implementation="triton"))(a, b)
    np.testing.assert_allclose(np.float32(got), np.float32(a) @ np.float32(b), rtol=2e-2, atol=0.5)


@pytest.mark.gpu
@paths
def test_export_and_reload(path):
    name = {"ffi": "triton_kernel_call_ffi", "ptx": TARGET}[path]
    with jtops.config.launch(path):
        checks = [jax.export.DisabledSafetyCheck.custom_call(name)]
        exported = jax.export.export(jax.jit(affine), disabled_checks=checks)(X)
        want = affine(X)
    for got, expected in zip(jax.export.deserialize(exported.serialize()).call(X), want, strict=True):
        np.testing.assert_array_equal(got, expected)


CACHED = """
import sys, jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
hit = "/jax/compilation_cache/cache_hits"
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event == hit else None)
import jtops
from tests.core.test_ptx_launch import X, affine
with jtops.config.launch(sys.argv[2]):
    lowered = jax.jit(affine).lower(X)
hits.clear()
compiled = lowered.compile()
print("hits", len(hits))
assert compiled(X)[0][10] > 2.0**39
"""


@pytest.mark.gpu
@paths
def test_persistent_cache(path, tmp_path):
    """A second process finds the program that the first one compiled."""
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CACHED, str(tmp_path), path]
    runs = [subprocess.run(command, env=env, capture_output=True, text=True, check=False) for _ in range(2)]
    assert [(r.returncode, r.stdout) for r in runs] == [(0, "hits 0\n"), (0, "hits 1\n")], runs[0].stderr + runs[1].stderr
