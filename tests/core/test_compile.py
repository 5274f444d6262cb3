"""Compiling for GPUs that are not there: targets, options, errors, threads, shipped text."""

import itertools
import re
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jtops
from jtops._compat.triton import tl, triton
from jtops.core.compile import kernel as compile_module
from jtops.core.launch import ffi
from jtops.core.target import MAX_SHARED_BYTES, Target
from tests.kernels import lowered, resources

X = jax.ShapeDtypeStruct((1024,), jnp.float32)


@triton.jit
def copy_kernel(x_ptr, o_ptr, BLOCK: tl.constexpr = 128):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * 3 + 1)


@triton.jit
def range_kernel(x_ptr, o_ptr):
    i = tl.arange(0, 100)
    tl.store(o_ptr + i, tl.load(x_ptr + i))


@triton.jit
def shape_kernel(x_ptr, o_ptr):
    x = tl.load(x_ptr + tl.arange(0, 64))
    tl.store(o_ptr + tl.arange(0, 128), x)


@triton.jit
def undefined_kernel(x_ptr, o_ptr):
    tl.store(o_ptr, nowhere)  # noqa: F821


@triton.jit
def chained_kernel(x_ptr, o_ptr):
    x = y = tl.load(x_ptr)
    tl.store(o_ptr, x + y)


@triton.jit
def _inner(x):
    return x + elsewhere  # noqa: F821


@triton.jit
def _outer(x):
    return _inner(x)


@triton.jit
def helper_kernel(x_ptr, o_ptr):
    tl.store(o_ptr, _outer(tl.load(x_ptr)))


@triton.jit
def library_kernel(x_ptr, o_ptr):
    x = tl.load(x_ptr + tl.arange(0, 8))
    tl.store(o_ptr + tl.arange(0, 8), tl.sort(x, dim=3))


@triton.jit
def shared_kernel(x_ptr, o_ptr):
    m, k = tl.arange(0, 128), tl.arange(0, 512)
    x = tl.load(x_ptr + m[:, None] * 512 + k[None, :])
    tl.store(o_ptr + m[:, None] * 128 + m[None, :], tl.dot(x, tl.trans(x + 1)))


@triton.jit
def accumulators_kernel(a_ptr, b_ptr, o_ptr, steps, N: tl.constexpr = 256, K: tl.constexpr = 16):
    """Three accumulators of 256 columns, all alive."""
    m, n, k = tl.arange(0, 128), tl.arange(0, N), tl.arange(0, K)
    x = tl.zeros((128, N), tl.float32)
    y, z = x, x
    for i in range(steps):
        a = tl.load(a_ptr + i * 128 * K + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + i * N * K + k[:, None] * N + n[None, :])
        x, y, z = tl.dot(a, b, x), tl.dot(a + 1, b, y), tl.dot(a - 1, b, z)
    tl.store(o_ptr + m[:, None] * N + n[None, :], x + y * 2 + z)


def copied(**kwargs):
    return lambda x: jtops.triton_call(x, kernel=copy_kernel, out_type=x, grid=8, **kwargs)


@pytest.mark.spec("compile and export for a target without that GPU")
@pytest.mark.spec("CUDA PTX path / ROCm HSACO path")
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_cuda_targets(target):
    (kernel,) = lowered.kernels(copied(), X, target=target)
    assert f".target {target}" in kernel.binary
    assert kernel.target == Target.parse(target)


@pytest.mark.spec("CUDA PTX path / ROCm HSACO path")
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_rocm_targets(target):
    (kernel,) = lowered.kernels(copied(), X, target=target, platform="rocm")
    assert kernel.binary.startswith(b"\x7fELF")
    text = lowered.text(copied(), X, target=target, platform="rocm")
    assert text == lowered.text(copied(), X, target=target, platform="rocm")
    assert re.search(rb"[0-9a-f]{64}\.hsaco", lowered.record(re.search(r'opaque = "((?:[^"\\]|\\.)*)"', text)[1]))


@pytest.mark.spec("compute_capability override")
@pytest.mark.spec("compile and export for a target without that GPU")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_text_is_one_that_a_gpu_machine_reads(target):
    """The driver and jaxlib's assembler may be older than the assembler that comes with Triton."""
    (kernel,) = lowered.kernels(lambda x: jtops.triton_call(x, kernel=copy_kernel, out_type=x, grid=8), X, target=target)
    major, minor = re.search(r"\.version (\d+)\.(\d+)", kernel.triton_kernel.asm["ptx"]).groups()
    assert (int(major), int(minor)) <= (8, 8)


def test_target_by_argument_setting_and_abstract_device():
    (kernel,) = lowered.kernels(copied(compute_capability=80), X, target="sm_90")
    assert kernel.target == Target(80)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(copied()).trace(X).lower(lowering_platforms=("cuda",)).as_text()
    assert "sm_90a" in text
    good = (90, "9.0", "sm_90a", "sm90", 9.0, "12.0", "gfx90a")
    assert [str(Target.parse(t)) for t in good] == ["sm_90"] * 5 + ["sm_120", "gfx90a"]
    assert Target(90).max_shared_bytes == MAX_SHARED_BYTES[90] == 232448
    for bad in ("h100", "", "sm_9000", "gfx", 90.0, "90.0", "sm_900"):
        with pytest.raises(ValueError, match="is not understood"):
            Target.parse(bad)
    with pytest.raises(ValueError, match=r"must be None or an architecture, such as 'sm_90' \(H100, H200\).*got 'h100'"):
        jtops.config.target("h100").__enter__()


@pytest.mark.spec("num_warps/num_stages/num_ctas")
@pytest.mark.spec("backend_options mapping")
def test_options_reach_the_compiler():
    """Each option gives its own kernel; the order in which they are written does not."""
    variants = [
        {"num_warps": 1},
        {"num_warps": 8},
        {"num_stages": 1},
        {"backend_options": {"enable_fp_fusion": False}},
        {"backend_options": {"maxnreg": 64}},
        {"backend_options": {"maxnreg": 64, "enable_fp_fusion": False}},
    ]
    kernels = [lowered.kernels(copied(**v), X)[0] for v in variants]
    assert len({id(k) for k in kernels}) == len(variants)
    assert [k.num_warps for k in kernels[:2]] == [1, 8]
    assert ".maxnreg 64" in kernels[4].binary
    assert "fma.rn" in kernels[0].binary
    assert "fma.rn" not in kernels[3].binary
    reordered = {"backend_options": {"enable_fp_fusion": False, "maxnreg": 64}}
    assert lowered.kernels(copied(**reordered), X)[0] is kernels[-1]
    with pytest.raises(ValueError, match="num_ctas=2 needs clusters, from sm_90 on"):
        lowered.kernels(copied(num_ctas=2), X, target="sm_80")


@pytest.mark.parametrize(
    ("kernel", "line", "said"),
    [
        (range_kernel, "i = tl.arange(0, 100)", "power of two|power of 2"),
        (shape_kernel, "tl.store(o_ptr + tl.arange(0, 128), x)", "[Cc]annot|shape"),
        (undefined_kernel, "tl.store(o_ptr, nowhere)", "nowhere is not defined"),
        (helper_kernel, "tl.store(o_ptr, _outer(", r"(?s)return _inner\(x\).*return x \+ elsewhere.*elsewhere is not defined"),
        (library_kernel, "tl.store(o_ptr + tl.arange(0, 8), tl.sort", "only minor dimension is currently supported"),
    ],
)
def test_compile_errors_show_the_line(kernel, line, said):
    """Case 48: kernel, target, file and line, the line itself, and Triton's own words."""
    f = lambda x: jtops.triton_call(x, kernel=kernel, out_type=x, grid=1)
    with pytest.raises(jtops.errors.KernelCompileError) as error:
        lowered.text(f, X)
    message = str(error.value)
    source = Path(__file__).read_text().splitlines()
    number = next(i for i, text in enumerate(source, 1) if text.strip().startswith(line) and i > kernel.starting_line_number)
    assert f"kernel {kernel.__name__} does not compile for sm_90" in message
    assert f"{__file__}:{number}" in message
    assert line in message
    assert re.search(said, message.split("Triton says:")[1])
    with pytest.raises(jtops.errors.KernelCompileError):  # a failure is not remembered as success, nor as a broken future
        lowered.text(f, X)


def test_source_that_triton_cannot_read():
    """Case 48: what fails before Triton compiles is told as what fails later."""
    f = lambda x: jtops.triton_call(x, kernel=chained_kernel, out_type=x, grid=1)
    said = (
        r"(?s)kernel chained_kernel does not compile for sm_90; stage: reading its source; at .*test_compile.py.*Triton says: Simul"
    )
    with pytest.raises(jtops.errors.KernelCompileError, match=said):
        lowered.text(f, X)


def test_too_much_shared_memory():
    out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    f = lambda x: jtops.triton_call(x, kernel=shared_kernel, out_type=out, grid=1)
    with pytest.raises(jtops.errors.KernelCompileError, match=r"needs \d+ bytes of shared memory, sm_86 has 101376 .*options: \{'"):
        lowered.text(f, jax.ShapeDtypeStruct((128, 512), jnp.float16), target="sm_86")


@pytest.mark.spec("clusters (num_ctas), TMEM limit check (512)")
def test_too_much_tensor_memory():
    """Refused when it is compiled: launched, it would hang the GPU."""
    a, out = jax.ShapeDtypeStruct((1 << 16,), jnp.bfloat16), jax.ShapeDtypeStruct((128, 256), jnp.float32)
    f = lambda a: jtops.triton_call(a, a, steps=7, kernel=accumulators_kernel, out_type=out, grid=1)
    with pytest.raises(jtops.errors.KernelCompileError, match=r"needs \d+ columns of tensor memory, sm_100 has 512"):
        lowered.text(f, a, target="sm_100")


def test_shipped_text_is_code_only():
    """No paths, no line tables, no comments; and it still assembles."""
    (kernel,) = lowered.kernels(copied(BLOCK=256), X)
    full = kernel.triton_kernel.asm["ptx"]
    name = Path(__file__).name  # the folder may be another checkout's, where Triton's cache is shared
    assert name in full
    for unwanted in ("//", ".loc", ".file", ".debug", name, "$L__tmp"):
        assert unwanted not in kernel.binary
    assert len(kernel.binary) < len(full) / 2
    assert resources.of(kernel)["spill_bytes"] == 0


def test_records_are_short():
    """The launch record holds the machine code, deflated; the same bytes whenever it is lowered."""

    def record():
        with jtops.config.launch("ffi"):
            return re.search(r'opaque = "((?:[^"\\]|\\.)*)"', lowered.text(copied(BLOCK=256), X))[1]

    (kernel,) = lowered.kernels(copied(BLOCK=256), X)
    opaque = record()
    assert kernel.binary.encode() in (whole := lowered.record(opaque))
    assert len(ffi.packed(whole)) < len(whole) / 2
    assert record() == opaque


@pytest.mark.spec("thread use (kernel call from worker thread)")
@pytest.mark.spec("the device of the data; threads compile and launch at once")
def test_threads_compile_a_kernel_once(monkeypatch):
    """Eight threads that want one new kernel get one compilation; threads that want others do not wait for it."""
    started, runs = threading.Barrier(8), []
    real = compile_module._run_triton

    def counted(kernel, *args):
        runs.append(kernel)
        return real(kernel, *args)

    monkeypatch.setattr(compile_module, "_run_triton", counted)
    errors, texts = [], []

    def work(block):
        try:
            started.wait()
            texts.append(lowered.text(copied(BLOCK=block, num_warps=2), X))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(block,)) for block in itertools.islice(itertools.cycle((32, 64)), 8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    assert len(texts) == 8
    assert len(set(texts)) == 2
    assert len(runs) == 2


def test_no_lock_is_held_while_compiling(monkeypatch):
    """Two threads are inside the compiler at the same time: each waits there for the other."""
    meeting, errors = threading.Barrier(2), []
    real = compile_module._run_triton

    def met(*args):
        meeting.wait(timeout=60)
        return real(*args)

    def work(block):
        try:
            lowered.text(copied(BLOCK=block, num_warps=1), X)
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(compile_module, "_run_triton", met)
    threads = [threading.Thread(target=work, args=(block,)) for block in (16, 2048)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []


OLD_TRITON = """
import sys, types
sys.modules["triton"] = types.ModuleType("triton")
sys.modules["triton"].__version__ = "3.1.0"
import jax, jtops
jtops.softmax(jax.numpy.ones(8), implementation="interpret")
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (OLD_TRITON, "jtops needs triton >= 3.6; found triton 3.1.0"),
        ("import jax; jax.__version__ = '0.10.0'; import jtops", "jtops needs jax >= 0.11.2; found jax 0.10.0"),
        (
            "import jax._src.callback as c; del c.emit_python_callback; import jtops",
            "jtops works with jax 0.11.2 to 0.12; found jax",
        ),
    ],
    ids=["old_triton", "old_jax", "other_jax"],
)
def test_versions_are_checked(script, says):
    """Case 48: a Triton too old for us is named at first use, a JAX at import, whatever names they lack."""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert f"ImportError: {says}" in run.stderr


@triton.jit
def sums_kernel(x_ptr, n, o_ptr, BLOCK: tl.constexpr):
    x_sum, xy_sum = tl.zeros((1, BLOCK), tl.float32), tl.zeros((1, BLOCK), tl.float32)
    i = tl.arange(0, BLOCK)[None, :]
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + i, mask=start + i < n, other=0.0).to(tl.float32)
        y = tl.load(x_ptr + n + start + i, mask=start + i < n, other=0.0).to(tl.float32)
        x_sum += x
        xy_sum += x * y
    tl.store(o_ptr + tl.arange(0, 1), tl.sum(x_sum, 1) / tl.sum(xy_sum, 1))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_many_numbers_a_thread(dtype):
    """LLVM's vectorizer in Triton 3.9 ends the process on these."""
    x, out = jax.ShapeDtypeStruct((2, 1 << 16), dtype), jax.ShapeDtypeStruct((1,), jnp.float32)
    sums = lambda x: jtops.triton_call(x, x.size // 2, kernel=sums_kernel, out_type=out, grid=1, BLOCK=2048)
    assert lowered.launches(sums, x, target="sm_90") == {"sums_kernel": 1}


def test_cluster_size():
    """Programs stay as they are; the kernel's text asks for clusters. Each size is a kernel of its own."""
    one, two, four = (lowered.kernels(copied(cluster_size=c), X)[0] for c in (None, 2, 4))
    assert lowered.kernels(copied(cluster_size=1), X)[0] is one
    assert "cluster" not in one.binary
    for size, kernel in ((2, two), (4, four)):
        assert f".explicitcluster\n.reqnctapercluster {size}, 1, 1" in kernel.binary
        assert resources.of(kernel)["spill_bytes"] == 0  # it assembles
    with pytest.raises(ValueError, match="cluster_size=2 needs clusters, from sm_90 on; compiling for sm_80"):
        lowered.kernels(copied(cluster_size=2), X, target="sm_80")
    with pytest.raises(ValueError, match=r"a grid of \(8, 1, 1\) does not split into clusters of 3 along its first axis"):
        lowered.kernels(copied(cluster_size=3), X)
    with pytest.raises(ValueError, match="cluster_size must be at most 8"):
        lowered.kernels(copied(cluster_size=16), X)
    with pytest.raises(ValueError, match="num_ctas=2 makes clusters of one program, cluster_size=2 of several; give one"):
        lowered.kernels(copied(cluster_size=2, num_ctas=2), X)
