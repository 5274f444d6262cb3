"""The specification of jtops.core, row by row: every row has a test that carries ``@pytest.mark.spec("<row>")``.

Markers are read from the sources, so that this takes no run of the tests, and slow and gpu tests count.
"""

import ast
import functools
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

CALL = """
positional array/scalar operands *args
scalar np.float32
Python float typing
int typing
bool typing
str / constexpr operands
arg == 1 specialization
pointer 16-byte alignment assumption
do_not_specialize honoured
keyword operands by kernel parameter name
**metaparams → constexpr
metaparam defaults from kernel signature
constexpr parameter anywhere in the signature / passed positionally
pytree inputs (tuples in kernel)
out_type pytree of shape/dtype
out_shape (single/sequence; ShapeDtypeStruct, jax/np array, SimpleNamespace)
multiple outputs
grid int / 1-3 tuple / callable(metaparams)
name
custom_call_target_name arg
num_warps/num_stages/num_ctas
device index
compute_capability override
enable_fp_fusion
backend_options mapping
input_output_aliases={in:out}
Ref operands (jax.new_ref) in-place
zeroed_outputs seq / callable(metaparams)
donate_argnames with jit
debug
serialized_metadata bytes
has_side_effect
never DCE'd at jaxpr level
cost_estimate={'flops','bytes_accessed'}
jit / eager / pmap / shard_map
vmap
jvp/grad
importable without GPU
thread use (kernel call from worker thread)
"""

KERNELS = """
triton.JITFunction
triton.runtime.Autotuner
early_config_prune / perf model prune
autotuner pre_hook
Heuristics
Autotuner over Heuristics
heuristic on num_warps
aliasing/Ref with autotune
Gluon kernels (GluonJITFunction/GluonASTSource)
device-side TMA descriptors (global scratch)
host-side TensorDescriptor(base,shape,strides,block_shape,layout,padding,round_f32_to_tf32), .from_array
clusters (num_ctas), TMEM limit check (512)
CUDA PTX path / ROCm HSACO path
"""

NAMES = """
CompilationResult(binary,name,shared_mem_bytes,cluster_dims,ttgir,llir)
aval_size_bytes(aval)
avals_to_layouts(avals)
compile_ttir_inplace(ttir,backend,options,cc,platform)
compile_ttir_to_ptx_inplace / compile_ttir_to_hsaco_inplace
get_cuda_backend / get_hip_backend(device,cc)
make_backend(make_gpu_target_func, compute_capability, num_ctas) -> (backend,target,cc)
get_or_create_triton_kernel(...)
get_triton_type(obj) / get_type_id(obj)
_JAX_TO_TRITON_TYPE_MAP
normalize_grid(grid, metaparams)
triton_kernel_call_abstract_eval / _lowering / _raise_on_jvp / _raise_on_vmap
JTJITFunction: arg_names, arg_name_to_index, signature, compiled_kernels_cache_size, is_gluon
make_autotuner_configs(fn,metaparams,named_args), apply_heuristics(fn,configs,kwargs,named_args)
TritonAutotunedKernelCall when >1 configs
native_specialize_impl attrs
cdiv, next_power_of_2 (jt.*, jt.utils.*)
strides_from_shape(shape)
jax_triton.utils submodule
ShapeDtype protocol, Grid, GridOrLambda aliases
JAX_TRITON_DUMP_DIR
JAX_TRITON_PTXAS_EXTRA_FLAGS, JAX_TRITON_PTXAS_DEVICE_DEBUG
TRITON_CACHE_DIR
recipes: vector add; jit add; multi-output split; in-place + donation; strides to kernel; \
autotune with fixed BLOCK_SIZE; autotune+override; heuristics; Gluon add/heuristics/constexpr/reductions; custom_vmap via lax.map; \
loop batching; custom_vjp; jax.grad through it; flash-attention wrapper (4 outputs: L, m, tmp, o) + triton.testing perf_report \
benchmark; IR dump analysis; import styles
"""

ADDITIONS = """
a second process starts with warm kernels
tuning before lowering, persisted, one answer for all hosts
two launch paths, byte-stable lowered text
the interpreter on any host
compile and export for a target without that GPU
strict front door
the device of the data; threads compile and launch at once
vmap_method and sharding_rule
"""

ROWS = [row for part in (CALL, KERNELS, NAMES, ADDITIONS) for row in part.strip().splitlines()]


@functools.cache
def marked() -> dict[str, list[str]]:
    """Row -> the places that carry its marker."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.spec":
                (row,) = node.args
                found.setdefault(ast.literal_eval(row), []).append(f"{path.relative_to(TESTS)}:{node.lineno}")
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row[:80] for row in ROWS])
def test_a_test_shows(row):
    assert row in marked(), f'no test carries @pytest.mark.spec("{row}")'


def test_markers_name_rows():
    assert not {row: places for row, places in marked().items() if row not in ROWS}
