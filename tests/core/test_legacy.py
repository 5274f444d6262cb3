"""Older names and keywords: each means what its document said, on our one form."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
from jax.extend.core import Primitive
from jax.interpreters import mlir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import jtops
import jtops.utils
from jtops._compat import jax as jax_compat
from jtops._compat import triton as triton_compat
from jtops._compat.triton import tl
from jtops.core.legacy import names as legacy
from tests.kernels import lowered

X = jax.ShapeDtypeStruct((1024,), jnp.float32)


@triton.jit
def affine_kernel(x_ptr, n, o_ptr, BLOCK: tl.constexpr = 128):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * 3 + n)


@triton.jit
def device_kernel(x_ptr, o_ptr, device, BLOCK: tl.constexpr = 128):
    i = tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i) + device)


@triton.jit
def increment_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i) + n)


def affine(x, **kwargs):
    return jtops.triton_call(x, 5, kernel=affine_kernel, grid=8, **kwargs)


@pytest.mark.spec("out_shape (single/sequence; ShapeDtypeStruct, jax/np array, SimpleNamespace)")
@pytest.mark.spec("ShapeDtype protocol, Grid, GridOrLambda aliases")
@pytest.mark.parametrize("make", [lambda x: x, np.asarray, jax.typeof, lambda x: SimpleNamespace(shape=x.shape, dtype=x.dtype)])
def test_out_shape(make):
    x = jnp.arange(1024.0)
    assert isinstance(make(x), legacy.ShapeDtype)
    np.testing.assert_array_equal(affine(x, out_shape=make(x), interpret=True), x * 3 + 5)
    (got,) = affine(x, out_shape=[make(x)], interpret=True)
    np.testing.assert_array_equal(got, x * 3 + 5)


@pytest.mark.spec("enable_fp_fusion")
@pytest.mark.spec("custom_call_target_name arg")
@pytest.mark.spec("device index")
def test_keywords_compile_as_todays():
    text = functools.partial(lowered.text, target="sm_90")
    plain = text(lambda x: affine(x, out_type=x), X)
    assert text(lambda x: affine(x, out_shape=x, enable_fp_fusion=True), X) == plain
    assert text(lambda x: affine(x, out_shape=x, device=0, custom_call_target_name="triton_kernel_call"), X) == plain
    unfused = text(lambda x: affine(x, out_type=x, backend_options={"enable_fp_fusion": False}), X)
    assert text(lambda x: affine(x, out_type=x, enable_fp_fusion=False), X) == unfused != plain


@pytest.mark.spec("device index")
@pytest.mark.gpu
def test_device_names_the_gpu_to_compile_for():
    x = jnp.arange(1024.0)
    np.testing.assert_array_equal(affine(x, out_shape=x, device=0), x * 3 + 5)
    with pytest.raises(ValueError, match=r"device=1000, but this process has \d+ cuda devices"):
        affine(x, out_shape=x, device=1000)


def test_a_kernels_own_parameter_is_its_own():
    x = jnp.arange(128.0)
    got = jtops.triton_call(x, kernel=device_kernel, out_shape=x, grid=1, device=7, interpret=True)
    np.testing.assert_array_equal(got, x + 7)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"out_shape": X, "out_type": X}, TypeError, "out_type and out_shape, its older name, are both given"),
        ({}, TypeError, "out_type is missing"),
        ({"out_shape": 3}, TypeError, "out_type leaves need"),
        ({"out_shape": X, "device": -1}, ValueError, "device must be the number of a GPU of this process; got -1"),
        ({"out_shape": X, "custom_call_target_name": "mine"}, ValueError, "must be one of 'triton_kernel_call'.*got 'mine'"),
        (
            {"out_shape": X, "enable_fp_fusion": True, "backend_options": {"enable_fp_fusion": False}},
            ValueError,
            "but backend_opti",
        ),
        ({"out_shapes": X}, TypeError, "'out_shapes' is neither a parameter of affine_kernel"),
    ],
)
def test_keyword_errors_teach(change, error, match):
    with pytest.raises(error, match=match):
        affine(jnp.ones(1024), interpret=True, **change)


@pytest.mark.spec("get_triton_type(obj) / get_type_id(obj)")
@pytest.mark.spec("_JAX_TO_TRITON_TYPE_MAP")
def test_type_names():
    assert legacy.get_triton_type is legacy.get_type_id
    values = {True: "B", -1: "i32", 2**31: "u32", 2**32: "i64", 2**63: "u64", 0.5: "fp32", 1e300: "fp64", "a": "str"}
    assert {v: legacy.get_type_id(v) for v in values} == values
    for name, dtype in (("bf16", jnp.bfloat16), ("fp8e4nv", jnp.float8_e4m3fn), ("i1", jnp.bool_), ("u8", jnp.uint8)):
        assert legacy.get_type_id(jax.core.ShapedArray((3,), jnp.dtype(dtype))) == f"*{name}"
        assert legacy._JAX_TO_TRITON_TYPE_MAP[jnp.dtype(dtype)] == name
    assert len(legacy._JAX_TO_TRITON_TYPE_MAP) == 17
    assert legacy.get_type_id(jax.typeof(jax.new_ref(jnp.ones(3)))) == "*fp32"
    assert legacy.get_type_id(tl.constexpr(True)) == "B"
    assert legacy.get_type_id(np.float32(1e-40)) == "fp32"
    descriptor = jtops.TensorDescriptor.from_array(jax.ShapeDtypeStruct((64, 64), jnp.float16), (32, 16))
    assert legacy.get_type_id(descriptor) == "tensordesc<fp16[32,16]>"
    with pytest.raises(ValueError, match="integer overflow: 18446744073709551616"):
        legacy.get_type_id(2**64)
    with pytest.raises(NotImplementedError, match="has no Triton type"):
        legacy.get_type_id(object())


@pytest.mark.spec("normalize_grid(grid, metaparams)")
@pytest.mark.spec("ShapeDtype protocol, Grid, GridOrLambda aliases")
def test_grids():
    assert legacy.normalize_grid(4, {}) == legacy.normalize_grid((4,), {}) == (4, 1, 1)
    assert legacy.normalize_grid(lambda meta: (meta["B"], 2), {"B": 3}) == (3, 2, 1)
    with pytest.raises(ValueError, match="one to three dimensions"):
        legacy.normalize_grid((1, 1, 1, 1), {})
    assert legacy.Grid
    assert legacy.GridOrLambda


@pytest.mark.spec("aval_size_bytes(aval)")
@pytest.mark.spec("avals_to_layouts(avals)")
@pytest.mark.spec("strides_from_shape(shape)")
@pytest.mark.spec("cdiv, next_power_of_2 (jt.*, jt.utils.*)")
@pytest.mark.spec("jax_triton.utils submodule")
def test_sizes():
    aval = jax.core.ShapedArray((2, 3, 4), jnp.dtype(jnp.bfloat16))
    assert legacy.aval_size_bytes(aval) == 48
    assert legacy.avals_to_layouts([aval, jax.core.ShapedArray((), jnp.dtype(jnp.int8))]) == [[2, 1, 0], []]
    for module in (jtops, jtops.utils):
        assert module.strides_from_shape((2, 3, 4)) == (12, 4, 1)
        assert [module.cdiv(n, 8) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
        assert [module.next_power_of_2(n) for n in (0, 1, 33, 64)] == [1, 1, 64, 64]
    assert legacy.strides_from_shape is jtops.strides_from_shape


def ttir(backend, target, options):
    """The kernel's Triton IR, as a program that compiles by hand makes it."""
    from triton._C.libtriton import ir  # noqa: PLC0415

    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(affine_kernel, {"x_ptr": "*fp32", "n": "i32", "o_ptr": "*fp32", "BLOCK": "constexpr"}, {(3,): 128})
    return source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)


@pytest.mark.spec("make_backend(make_gpu_target_func, compute_capability, num_ctas) -> (backend,target,cc)")
@pytest.mark.spec("get_cuda_backend / get_hip_backend(device,cc)")
def test_backends():
    backend, target, capability = legacy.make_backend(legacy.make_cuda_target, 90, 2)
    assert (target, capability) == (GPUTarget("cuda", 90, 32), 90)
    assert backend.target == legacy.get_cuda_backend(0, 90).target == target
    with jtops.config.target("sm_80"):
        assert legacy.make_backend(legacy.make_cuda_target, None, 1)[2] == 80
    assert legacy.get_hip_backend(0, "gfx942").target == legacy.make_hip_target("gfx942") == GPUTarget("hip", "gfx942", 64)
    with pytest.raises(ValueError, match="num_ctas=2 needs clusters, from sm_90 on; the target is sm_80"):
        legacy.make_backend(legacy.make_cuda_target, 80, 2)


@pytest.mark.spec("compile_ttir_inplace(ttir,backend,options,cc,platform)")
@pytest.mark.spec("compile_ttir_to_ptx_inplace / compile_ttir_to_hsaco_inplace")
@pytest.mark.spec("CompilationResult(binary,name,shared_mem_bytes,cluster_dims,ttgir,llir)")
@pytest.mark.parametrize(("platform", "capability"), [("cuda", 90), ("rocm", "gfx950")])
def test_compiling_by_hand(platform, capability, capsys):
    make = legacy.make_cuda_target if platform == "cuda" else legacy.make_hip_target
    backend, target, capability = legacy.make_backend(make, capability, 1)
    options = backend.parse_options({"num_warps": 2, "debug": True, "enable_fp_fusion": True})
    made = legacy.compile_ttir_inplace(ttir(backend, target, options), backend, options, capability, platform)
    assert (made.name, made.shared_mem_bytes, made.cluster_dims) == ("affine_kernel", 0, (1, 1, 1))
    assert "num-warps" in made.ttgir
    assert "define" in made.llir
    said = capsys.readouterr().out
    assert "tt.func public @affine_kernel" in said
    assert made.llir in said
    if platform == "cuda":
        assert ".target sm_90a" in made.binary
        assert made.binary in said
    else:
        assert made.binary.endswith(".hsaco")
        with open(made.binary, "rb") as file:
            assert file.read(4) == b"\x7fELF"
    with pytest.raises(ValueError, match="platform must be 'cuda' or 'rocm'; got 'tpu'"):
        legacy.compile_ttir_inplace(None, backend, options, capability, "tpu")


@pytest.mark.spec("compile_ttir_to_ptx_inplace / compile_ttir_to_hsaco_inplace")
def test_a_failing_pass_is_shown(monkeypatch):
    backend, _, capability = legacy.make_backend(legacy.make_cuda_target, 90, 1)
    options, shown = backend.parse_options({"enable_fp_fusion": True}), []

    class Module:
        dump = staticmethod(lambda: shown.append("module"))

    def fail(*_):
        raise RuntimeError("no")

    for stage, message in (("ttir", "TTIR->TTGIR"), ("llir", "TTGIR->LLIR")):
        monkeypatch.setattr(triton_compat, "compiler_stages", lambda *_, stage=stage: {stage: fail})
        with pytest.raises(ValueError, match=f"{message} pass failed!"):
            legacy.compile_ttir_to_ptx_inplace(Module(), backend, options, capability)
    assert shown == ["module"] * 2
    with pytest.raises(ValueError, match="compute_capability 80 is not the backend's, 90"):
        legacy.compile_ttir_to_ptx_inplace(Module(), backend, options, 80)


@pytest.mark.spec("get_or_create_triton_kernel(...)")
@pytest.mark.spec("JTJITFunction: arg_names, arg_name_to_index, signature, compiled_kernels_cache_size, is_gluon")
@pytest.mark.spec("TritonAutotunedKernelCall when >1 configs")
def test_kernels_by_hand(capsys):
    """Compiled once for equal types; several configs make jaxlib's autotuned call, which jtops itself never emits."""
    wrapped = legacy.JTJITFunction(triton.heuristics({"BLOCK": lambda args: 64})(affine_kernel))
    assert wrapped.fn is affine_kernel
    assert wrapped.arg_names == wrapped.param_names == list(wrapped.signature.parameters) == ["x_ptr", "n", "o_ptr", "BLOCK"]
    assert wrapped.arg_name_to_index == {"x_ptr": 0, "n": 1, "o_ptr": 2, "BLOCK": 3}
    assert (wrapped.name, wrapped.constexpr_param_names, wrapped.param_defaults) == ("affine_kernel", {"BLOCK"}, {"BLOCK": 128})
    assert not wrapped.is_gluon
    types, scalars = ["*fp32", "i32", "*fp32"], [(1, "i32", 48)]
    make = functools.partial(
        legacy.get_or_create_triton_kernel, legacy.get_cuda_backend, "cuda", affine_kernel, types, scalars, compute_capability=90
    )
    before = wrapped.compiled_kernels_cache_size
    made = [make(metaparams={"BLOCK": block}) for block in (512, 256, 512)]
    assert wrapped.compiled_kernels_cache_size == before + 2
    kernel, attributes = made[0]
    assert attributes == {
        (0,): [["tt.divisibility", 16]],
        (1,): [["tt.divisibility", 16]],
        (2,): [["tt.divisibility", 16]],
        (3,): [],
    }
    lib = jax_compat.gpu_triton
    parameters = [lib.create_array_parameter(0, 16), lib.create_scalar_parameter(48, "i32"), lib.create_array_parameter(0, 16)]
    calls = [lib.TritonKernelCall(k, 2, 1, 1, parameters) for k, _ in made[:2]]
    assert legacy.make_kernel_call("tuned", calls[:1], ["one"]) is calls[0]
    record = legacy.make_kernel_call("tuned", calls, ["BLOCK: 512", "BLOCK: 256"]).to_proto("tuned", b"")
    assert record.count(b".target sm_90a") == 2
    assert b"BLOCK: 256" in record
    assert isinstance(kernel, lib.TritonKernel)
    make(metaparams={"BLOCK": 512}, dump=True)
    assert "tt.func public @affine_kernel" in capsys.readouterr().out
    with pytest.raises(ValueError, match="platform is 'cuda', but the backend is for gfx942"):
        legacy.get_or_create_triton_kernel(
            legacy.get_hip_backend, "cuda", affine_kernel, [], [], compute_capability="gfx942", metaparams={}
        )


@pytest.mark.spec("make_autotuner_configs(fn,metaparams,named_args), apply_heuristics(fn,configs,kwargs,named_args)")
def test_configs_by_hand():
    plain = [triton.Config({"BLOCK": block}, num_warps=block // 32) for block in (64, 128, 256)]
    prune = {"early_config_prune": lambda configs, args, **_: [c for c in configs if c.kwargs["BLOCK"] <= args["n"]]}
    tuner = triton.autotune(plain, key=["n"], prune_configs_by=prune)(affine_kernel)
    names = lambda configs: [c.kwargs["BLOCK"] for c in configs]
    assert names(legacy.make_autotuner_configs(tuner, {}, {"n": 128})) == [64, 128]
    assert names(legacy.make_autotuner_configs(tuner, {"BLOCK": 64, "n": 3}, {"n": 500})) == [64]
    assert legacy.make_autotuner_configs(tuner, {"BLOCK": 32}, {"n": 500}) == []
    hooked = triton.autotune([triton.Config({"BLOCK": 64}, pre_hook=print)], key=["n"])(affine_kernel)
    with pytest.raises(NotImplementedError, match="pre_hook"):
        legacy.make_autotuner_configs(hooked, {}, {"n": 1})
    rules = {"BLOCK": lambda args: args["n"] * args["scale"], "num_warps": lambda args: 8 if args["BLOCK"] > 64 else 1}
    heuristics = triton.heuristics(rules)(affine_kernel)
    made = legacy.apply_heuristics(heuristics, [triton.Config({}), triton.Config({}, num_warps=2)], {"scale": 2}, {"n": 64})
    assert [(c.kwargs, c.num_warps) for c in made] == [({"BLOCK": 128}, 8)] * 2


@pytest.mark.spec("triton_kernel_call_abstract_eval / _lowering / _raise_on_jvp / _raise_on_vmap")
def test_a_primitive_by_hand():
    """A primitive made of the old rules lowers to the text that triton_call gives."""
    old_p = Primitive("triton_kernel_call")
    old_p.multiple_results = True
    old_p.def_abstract_eval(legacy.triton_kernel_call_abstract_eval)
    mlir.register_lowering(old_p, functools.partial(legacy.triton_kernel_call_lowering, legacy.get_cuda_backend), platform="cuda")
    given = {"fn": affine_kernel, "scalar_args": ((1, "i32", 5),), "name": "", "out_shapes": (X,), "grid": 8, "BLOCK": 128}
    old = lowered.text(lambda x: old_p.bind(x, compute_capability=90, **given)[0], X)
    launch = lambda text: re.search(lowered.CALL + ".*", text)[0]
    assert launch(old) == launch(lowered.text(lambda x: affine(x, out_type=x), X))
    given |= {"fn": increment_kernel, "input_output_aliases": ((0, 0),), "zeroed_outputs": (0,)}
    old = lowered.text(lambda x: old_p.bind(x, compute_capability=90, **given)[0], X)
    options = {"input_output_aliases": {0: 0}, "zeroed_outputs": (0,)}
    new = lowered.text(lambda x: jtops.triton_call(x, 5, kernel=increment_kernel, out_type=x, grid=8, BLOCK=128, **options), X)
    assert launch(old) == launch(new)
    assert "output_operand_alias" in launch(old)
    for rule, words in (("jvp", "custom_vjp"), ("vmap", "custom_vmap")):
        with pytest.raises(NotImplementedError, match=words):
            getattr(legacy, f"triton_kernel_call_raise_on_{rule}")(1, x=2)


@pytest.mark.spec("TRITON_CACHE_DIR")
def test_tritons_disk_cache_is_where_it_says(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    lowered.text(lambda x: affine(x, out_type=x, BLOCK=32, num_warps=8), X)
    assert [path.name for path in tmp_path.rglob("*.ptx")] == ["affine_kernel.ptx"]


def test_nobody_else_uses_older_names():
    """Only triton_call's keywords pass through them."""
    package = Path(jtops.__file__).parent
    imports = re.compile(r"^\s*(import|from) .*\blegacy", re.MULTILINE)
    users = {str(p.relative_to(package)) for p in package.rglob("*.py") if imports.search(p.read_text())}
    assert users == {"core/legacy/__init__.py", "core/legacy/names.py"}
