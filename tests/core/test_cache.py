"""Compiled kernels in memory and on disk: what tells kernels apart, many processes, damage."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat import triton as triton_compat
from jtops._compat.triton import tl, triton
from jtops.core import cache
from jtops.core.types import Constexpr, Scalar
from tests.kernels import lowered

X = jnp.arange(16)


@triton.jit
def scaled(x_ptr, o_ptr, FACTOR: tl.constexpr = 2):
    i = tl.arange(0, 16)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * FACTOR)


@triton.jit
def told(x_ptr, o_ptr, n, FLAG: tl.constexpr):
    """Computes something else for each type of FLAG."""
    i = tl.arange(0, 16)
    tl.store(o_ptr + i, (tl.load(x_ptr + i) * FLAG + n).to(tl.int32))


def factory(kind, c=0):
    """Kernels all called k, from one place."""
    c = tl.constexpr(c)
    if kind == "double":

        @triton.jit
        def k(x_ptr, o_ptr):
            i = tl.arange(0, 16)
            tl.store(o_ptr + i, tl.load(x_ptr + i) * 2)

    elif kind == "add 100":

        @triton.jit
        def k(x_ptr, o_ptr):
            i = tl.arange(0, 16)
            tl.store(o_ptr + i, tl.load(x_ptr + i) + 100)

    else:

        @triton.jit
        def k(x_ptr, o_ptr):
            i = tl.arange(0, 16)
            tl.store(o_ptr + i, tl.load(x_ptr + i) + c)

    return k


def helper(c):
    c = tl.constexpr(c)

    @triton.jit
    def shifted(x):
        return x + c

    return shifted


first, second = helper(1), helper(10)
one, other = types.ModuleType("one"), types.ModuleType("other")
one.shifted, other.shifted = helper(100), helper(1000)


@triton.jit
def applied(x, f: tl.constexpr):
    return f(x)


@triton.jit
def two_helpers(x_ptr, o_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(o_ptr + i, first(x) * second(x) + applied(x, other.shifted) - applied(x, one.shifted))


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    cache.clear()


def call(kernel, x=X, **kwargs):
    return jtops.triton_call(x, kernel=kernel, out_type=x, grid=1, **kwargs)


@triton.jit
def chained(x_ptr, o_ptr, HELPERS: tl.constexpr, LAST: tl.constexpr):
    """HELPERS one after the other, then LAST."""
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    for k in tl.static_range(len(HELPERS)):
        x = HELPERS[k](x)
    tl.store(o_ptr + i, LAST(x))


def helper_factory(kind):
    """Helpers all called helper, from one place."""
    if kind == "triple":

        @triton.jit
        def helper(x):
            return x * 3

    else:

        @triton.jit
        def helper(x):
            return x + 7

    return helper


@triton.jit
def branched(x_ptr, o_ptr, MODE: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(o_ptr + i, tl.load(x_ptr + i) + (100 if MODE == 1 else 200))


@triton.jit
def scaled_by(x_ptr, o_ptr, factor):
    i = tl.arange(0, 16)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * factor)


def compiled(*args, target="sm_90", **kwargs):
    return lowered.kernels(lambda x: call(*args, x, **kwargs), X, target=target)[0]


def constants(kernel) -> set[int]:
    """The integers that a compiled kernel adds or multiplies with."""
    text = kernel.triton_kernel.asm["ttir"]
    return {int(line.split("dense<")[1].split(">")[0]) for line in text.splitlines() if "arith.constant dense<" in line}


def counts():
    s = cache.statistics()
    return s.compiled, s.memory_hits, s.disk_hits, s.damaged


KERNELS = {"double": factory("double"), "add 100": factory("add 100"), **{c: factory("closure", c) for c in (1, 2, 3)}}
WANT = {"double": X * 2, "add 100": X + 100, **{c: X + c for c in (1, 2, 3)}}


@pytest.mark.parametrize("interpret", [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)])
def test_kernels_of_one_name(interpret):
    """Case 43: in one program and in several, bodies, closures and helpers are not mixed."""
    together = jax.jit(lambda x: [call(k, x, interpret=interpret) for k in KERNELS.values()])(X)
    for got, (name, k) in zip(together, KERNELS.items(), strict=True):
        np.testing.assert_array_equal(got, WANT[name])
        np.testing.assert_array_equal(jax.jit(lambda x: call(k, x, interpret=interpret))(X), WANT[name])
    np.testing.assert_array_equal(call(two_helpers, interpret=interpret), (X + 1) * (X + 10) + 900)


TRIPLE, ADD = helper_factory("triple"), helper_factory("add")


def test_helpers_of_one_name_as_constants():
    """Two programs, kept apart though both are lowered before either runs; and two helpers in one kernel."""
    calls = {((TRIPLE,), ADD): X * 3 + 7, ((ADD,), TRIPLE): (X + 7) * 3, ((), ADD): X + 7, ((), TRIPLE): X * 3}
    programs = [
        jax.jit(lambda x, h=h, last=last: call(chained, x, HELPERS=h, LAST=last, interpret=True)).lower(X).compile()
        for h, last in calls
    ]
    for program, want in zip(programs, calls.values(), strict=True):
        np.testing.assert_array_equal(program(X), want)


def test_helpers_of_one_name_as_constants_compile_apart():
    texts = [
        compiled(chained, HELPERS=h, LAST=last).binary for h, last in (((ADD,), TRIPLE), ((TRIPLE,), ADD), ((), TRIPLE), ((), ADD))
    ]
    assert len(set(texts)) == 4


def test_constants_that_print_alike_compile_apart():
    assert 100 in constants(compiled(branched, MODE=1))
    assert 200 in constants(compiled(branched, MODE="1"))


def test_negative_zero():
    """Equal to 0.0 for Python, not for a kernel: in one program, and as constants."""
    x = X.astype(jnp.float32) + 1
    zeros = jax.jit(lambda x: [call(scaled_by, x, factor=f, interpret=True) for f in (0.0, -0.0)])(x)
    assert [bool(np.signbit(z).any()) for z in zeros] == [False, True]
    assert len({Constexpr((c,)) for c in (0.0, -0.0, 1, 1.0, True, (1,), (True,), float("nan"), np.nan * 1)}) == 8
    assert Scalar(float("nan"), "fp32") == Scalar(-float("nan") + 1, "fp32")


def test_kernels_of_one_name_compile_apart():
    """Case 43, and once more from disk."""
    for _ in range(2):
        found = {name: constants(compiled(k)) for name, k in KERNELS.items()}
        assert found.pop("double") in ({1}, {2})  # a shift or a product
        assert found == {"add 100": {100}, 1: {1}, 2: {2}, 3: {3}}
        assert constants(compiled(two_helpers)) == {1, 10, 100, 1000}
        cache.clear()
    np.testing.assert_array_equal(call(two_helpers, interpret=True), (X + 1) * (X + 10) + 900)


def test_what_tells_kernels_apart():
    """Case 45: options, targets, constants by type; not the order of options, nor NaN."""
    options = [
        {"num_warps": 1},
        {"num_warps": 8},
        {"num_stages": 1},
        {"num_stages": 3},
        {"backend_options": {"enable_fp_fusion": False}},
        {"backend_options": {"maxnreg": 64, "enable_fp_fusion": False}},
    ]
    variants = [compiled(scaled, **o) for o in options] + [compiled(scaled, target=t) for t in ("sm_80", "sm_86")]
    assert len({k.triton_kernel.hash for k in variants}) == len(variants)
    assert [k.triton_kernel.metadata.num_warps for k in variants[:2]] == [1, 8]
    assert [k.triton_kernel.metadata.target.arch for k in variants[-2:]] == [80, 86]
    assert compiled(scaled, backend_options={"enable_fp_fusion": False, "maxnreg": 64}) is variants[5]
    flags = [compiled(told, n=3, FLAG=f) for f in (True, 1, 1.0, float("nan"))]
    assert len({id(k) for k in flags}) == 4
    before = cache.statistics()
    assert compiled(told, n=3, FLAG=float("nan")) is flags[3]
    assert compiled(told, n=3, FLAG=True) is flags[0]
    after = cache.statistics()
    assert (after.compiled, after.memory_hits - before.memory_hits) == (before.compiled, 2)


@pytest.mark.spec("a second process starts with warm kernels")
def test_statistics_and_clear():
    assert counts() == (0, 0, 0, 0)
    kernel = compiled(scaled)
    assert counts() == (1, 0, 0, 0)
    assert cache.statistics().seconds > 0
    assert compiled(scaled) is kernel
    assert counts() == (1, 1, 0, 0)
    cache.clear()
    assert counts() == (0, 0, 0, 0)
    again = compiled(scaled)
    assert counts() == (0, 0, 1, 0)
    assert again is not kernel
    assert again.binary == kernel.binary


@pytest.mark.spec("TRITON_CACHE_DIR")
def test_the_directory_may_change(tmp_path, monkeypatch):
    """Case 45: a kernel not yet in memory goes to the new place."""
    compiled(scaled)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    compiled(scaled, FACTOR=3)
    assert {p.name for p in (tmp_path / "elsewhere").rglob("*.ptx")} == {"scaled.ptx"}
    cache.clear()
    compiled(scaled)
    assert counts() == (1, 0, 0, 0)


DAMAGES = {
    "group cut": ("__grp__scaled.json", lambda b: b[: len(b) // 2]),
    "group empty": ("__grp__scaled.json", lambda b: b""),
    "group of something else": ("__grp__scaled.json", lambda b: b"[]"),
    "metadata cut": ("scaled.json", lambda b: b[: len(b) // 2]),
    "metadata changed": ("scaled.json", lambda b: b.replace(b'"num_warps": 4', b'"num_warps": 2')),
    "code cut": ("scaled.ptx", lambda b: b[: len(b) // 2]),
    "code empty": ("scaled.ptx", lambda b: b""),
    "code not text": ("scaled.ptx", lambda b: b"\xff\xfe" + b),
    "code changed": ("scaled.ptx", lambda b: b.replace(b"shl.b32", b"shr.b32")),
    "code missing": ("scaled.ptx", None),
    "metadata missing": ("scaled.json", None),
    "seal cut": ("jtops.json", lambda b: b[:10]),
}

UNNOTICED = ("metadata changed", "code cut", "code empty", "code changed", "seal cut")  # Triton itself would use these, or fail


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Triton 3.9's, from a half-read entry
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_repaired(name, tmp_path, caplog):
    """Case 49: a damaged entry is made anew, with a word about it, and is whole for the next process."""
    binary = compiled(scaled).binary
    file, change = DAMAGES[name]
    (path,) = (tmp_path / "triton").rglob(file)
    if change is None:
        path.unlink()
    else:
        data = path.read_bytes()
        assert data != change(data)
        path.write_bytes(change(data))
    cache.clear()
    assert compiled(scaled).binary == binary
    if name in UNNOTICED:
        assert cache.statistics().damaged == 1
        assert "kernel scaled: its entry in Triton's disk cache is damaged" in caplog.text
    cache.clear()
    assert compiled(scaled).binary == binary
    assert counts() == (0, 0, 1, 0)


def test_entries_that_triton_made(tmp_path):
    """They have no seal, and serve unless they are visibly cut."""
    compiled(scaled)
    (seal,) = (tmp_path / "triton").rglob("jtops.json")
    (ptx,) = (tmp_path / "triton").rglob("scaled.ptx")
    seal.unlink()
    cache.clear()
    compiled(scaled)
    assert counts() == (0, 0, 1, 0)
    ptx.write_bytes(ptx.read_bytes()[:-200])
    cache.clear()
    compiled(scaled)
    assert counts() == (1, 0, 0, 1)


def test_two_processes_repair_one_entry(tmp_path, monkeypatch):
    """Case 114: the other process has removed the damaged entry in the meantime."""
    binary = compiled(scaled).binary
    (path,) = (tmp_path / "triton").rglob("scaled.ptx")
    path.write_bytes(path.read_bytes()[:-200])
    manager = triton_compat.get_cache_manager

    def other(key):
        made = manager(key)
        found = made.get_file

        def get_file(name):
            path = found(name)
            if path and name.startswith("__grp__"):
                os.unlink(path)
            return path

        made.get_file = get_file
        return made

    monkeypatch.setattr(triton_compat, "get_cache_manager", other)
    cache.clear()
    assert compiled(scaled).binary == binary
    assert cache.statistics().damaged == 1


def test_binaries_alone_in_the_cache(monkeypatch):
    """Case 67: an error that names Triton's setting; without it the entry is made whole."""
    with monkeypatch.context() as setting:
        setting.setenv("TRITON_STORE_BINARY_ONLY", "1")
        for _ in range(2):
            with pytest.raises(jtops.errors.KernelCompileError, match=r"kernel scaled: TRITON_STORE_BINARY_ONLY is set.*Unset it"):
                compiled(scaled)
    assert "scaled" in compiled(scaled).binary


def test_a_directory_that_cannot_be_made(tmp_path, monkeypatch):
    """Case 77: the directory is to blame, not the kernel."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(jtops.errors.KernelCompileError, match=r"TRITON_CACHE_DIR names, .*file/below") as caught:
        compiled(scaled)
    assert "does not compile" not in str(caught.value)


def test_a_wrong_option_is_no_damage(caplog):
    with pytest.raises(jtops.errors.KernelCompileError, match="ARCH"):
        compiled(scaled, backend_options={"arch": "no such"})
    assert cache.statistics().damaged == 0
    assert "damaged" not in caplog.text


WORKER = textwrap.dedent("""
    import sys, json
    import tests.core.test_cache as t
    from jtops.core import cache
    print("ready", flush=True)
    sys.stdin.readline()
    texts = {str(n): [t.compiled(k).binary, sorted(t.constants(t.compiled(k)))] for n, k in t.KERNELS.items()}
    texts["two"] = t.compiled(t.two_helpers).binary
    s = cache.statistics()
    print(json.dumps([texts, s.compiled, s.disk_hits, s.damaged]))
""")


def workers(number):
    command = [sys.executable, "-W", "ignore", "-c", WORKER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(number)]
    for p in started:
        assert p.stdout.readline() == "ready\n", p.communicate()[1][-2000:]
    for p in started:  # all go at once
        p.stdin.write("go\n")
        p.stdin.flush()
    return started


def results(started):
    said = [p.communicate(timeout=300) for p in started]
    assert [p.returncode for p in started] == [0] * len(started), [error[-2000:] for _, error in said]
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.spec("a second process starts with warm kernels")
@pytest.mark.slow
@pytest.mark.spec("a second process starts with warm kernels")
def test_many_processes_and_one_empty_directory():
    """Cases 43 and 49: four start at once on nothing; a fifth finds everything."""
    found = results(workers(4))
    assert all(f[0] == found[0][0] for f in found)
    ((texts, new, from_disk, damaged),) = results(workers(1))
    assert texts == found[0][0]
    assert (new, from_disk, damaged) == (0, len(KERNELS) + 1, 0)
    mine = compiled(two_helpers)
    assert mine.binary == texts["two"]
    assert cache.statistics().disk_hits == 1


@pytest.mark.slow
def test_killed_while_compiling(tmp_path):
    """Case 49: whatever instant a process is killed at, the next one gets whole kernels."""
    folder = tmp_path / "triton"
    for seen in ("*.source", "*.ttgir", "*.ptx", "__grp__*"):  # files appear in this order
        (process,) = workers(1)
        deadline = time.monotonic() + 120
        known = set(folder.rglob(seen))
        while not set(folder.rglob(seen)) - known and process.poll() is None:
            assert time.monotonic() < deadline
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break  # everything was there
    ((texts, _, _, damaged),) = results(workers(1))
    assert damaged == 0
    assert texts["double"][1] in ([1], [2])
    assert set(texts) == {*map(str, KERNELS), "two"}


def test_without_a_seal_in_a_read_only_directory(tmp_path):
    """Shared caches of containers: what is there serves, though nothing can be written."""
    binary = compiled(scaled).binary
    folder = tmp_path / "triton"
    (seal,) = folder.rglob("jtops.json")
    seal.unlink()
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        cache.clear()
        assert compiled(scaled).binary == binary
        assert counts() == (0, 0, 1, 0)
    finally:
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)


def test_compat_names():
    """What the repair leans on is Triton's own: the same folder that triton.compile uses."""
    kernel = compiled(scaled).triton_kernel
    assert triton_compat.cache_manager(kernel.hash).get_file("scaled.ptx") == kernel.metadata_group["scaled.ptx"]
