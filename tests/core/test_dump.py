"""debug=True and the folders of intermediate texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.triton import tl, triton
from tests.kernels import lowered

X = jax.ShapeDtypeStruct((1024,), jnp.float32)
TEXTS = {"kernel.ttir": "tt.func public @small_kernel", "kernel.ttgir": "ttg.num-warps", "kernel.llir": "define"}


@triton.jit
def small_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr = 128):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.device_assert(i < n, "beyond the end")
    tl.store(o_ptr + i, tl.load(x_ptr + i) * 2)


def doubled(**kwargs):
    return lambda x: jtops.triton_call(x, n=1024, kernel=small_kernel, out_type=x, grid=8, **kwargs)


@pytest.mark.spec("JAX_TRITON_DUMP_DIR")
@pytest.mark.parametrize("name", ["JTOPS_DUMP_DIR", "JAX_TRITON_DUMP_DIR"])
def test_folders(name, tmp_path, monkeypatch, capsys):
    """One per kernel, the same each time it is lowered."""
    monkeypatch.setenv(name, str(tmp_path))
    lowered.text(doubled(), X)
    lowered.text(doubled(num_warps=8), X)
    (first, second) = folders = sorted(tmp_path.iterdir())
    kept = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
    lowered.text(doubled(), X)
    assert sorted(tmp_path.iterdir()) == folders
    assert {path: path.read_bytes() for folder in folders for path in folder.iterdir()} == kept
    for folder in folders:
        for file, part in (TEXTS | {"kernel.ptx": ".target sm_90a"}).items():
            assert part in (folder / file).read_text()
        assert "name: small_kernel\n" in (folder / "kernel.compile_info").read_text()
        assert "shared_bytes: 0\n" in (folder / "kernel.compile_info").read_text()
        config = (folder / "config").read_text()
        for line in ("target: sm_90", "  x_ptr: *fp32", "  n: i32", "  BLOCK: Constexpr(128)", "  enable_fp_fusion: True"):
            assert f"{line}\n" in config
    assert ("num_warps: 8" in (first / "config").read_text()) != ("num_warps: 8" in (second / "config").read_text())
    assert capsys.readouterr().out == ""


@pytest.mark.spec("JAX_TRITON_DUMP_DIR")
def test_folders_for_rocm(tmp_path, monkeypatch):
    monkeypatch.setenv("JTOPS_DUMP_DIR", str(tmp_path))
    lowered.text(doubled(), X, target="gfx942", platform="rocm")
    (folder,) = tmp_path.iterdir()
    assert (folder / "kernel.hsaco").read_bytes().startswith(b"\x7fELF")
    assert "amdhsa_kernel small_kernel" in (folder / "kernel.amdgcn").read_text()


@pytest.mark.spec("debug")
def test_debug_prints_and_keeps(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    (plain,) = lowered.kernels(doubled(), X)
    (kernel,) = lowered.kernels(doubled(debug=True), X)
    (folder,) = (tmp_path / "jtops_debug").iterdir()
    said = capsys.readouterr().out
    for stage, part in (TEXTS | {"kernel.ptx": ".target sm_90a"}).items():
        assert f"{stage.split('.')[1]}, {folder / stage}\n" in said
        assert part in said
        assert (folder / stage).read_text() in said
    assert "__assertfail" in kernel.binary
    assert "__assertfail" not in plain.binary
    lowered.text(doubled(debug=True), X)  # lowered again, shown again
    assert capsys.readouterr().out == said
    lowered.text(doubled(backend_options={"debug": True}), X)
    assert capsys.readouterr().out == said


@pytest.mark.spec("JAX_TRITON_PTXAS_EXTRA_FLAGS, JAX_TRITON_PTXAS_DEVICE_DEBUG")
@pytest.mark.gpu
def test_jaxlib_reads_its_own_variables(monkeypatch):
    """A flag that ptxas does not know makes the first launch of a kernel fail: flags arrive."""
    x = jnp.arange(1024.0)
    monkeypatch.setenv("JAX_TRITON_PTXAS_EXTRA_FLAGS", "--no-such-flag")
    with pytest.raises(jax.errors.JaxRuntimeError):
        jax.block_until_ready(doubled(num_warps=1)(x))
    monkeypatch.setenv("JAX_TRITON_PTXAS_EXTRA_FLAGS", "-v")
    monkeypatch.setenv("JAX_TRITON_PTXAS_DEVICE_DEBUG", "1")
    np.testing.assert_array_equal(doubled(num_warps=2)(x), 2 * x)
