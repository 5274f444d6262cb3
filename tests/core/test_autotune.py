"""@triton.autotune and @triton.heuristics: which config is settled, from where, and that it is the same everywhere."""

import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat import jax as jax_compat
from jtops._compat import triton as triton_compat
from jtops._compat.triton import tl, triton
from jtops.core import cache, target
from jtops.core.tuning import processes, settle, timing
from jtops.core.tuning import table as tuning_table
from tests.kernels import lowered

X = jnp.arange(4096.0)
KIND = jax.ShapeDtypeStruct(X.shape, X.dtype)
GPU = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")


def scaled(x_ptr, o_ptr, n, BLOCK: tl.constexpr, SCALE: tl.constexpr = 2):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n) * SCALE, mask=i < n)


plain = triton.jit(scaled)
configs = [triton.Config({"BLOCK": b}, num_warps=w) for b, w in ((64, 2), (128, 4), (256, 4))]
tuned = triton.autotune(configs, key=["n"])(plain)


@triton.jit
def product_kernel(x_ptr, o_ptr, K: tl.constexpr, BLOCK: tl.constexpr = 64):
    i, k = tl.arange(0, BLOCK), tl.arange(0, 64)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, K, 64):  # each stage in flight holds two tiles in shared memory
        x = tl.load(x_ptr + i[:, None] * K + start + k[None, :])
        y = tl.load(x_ptr + i[None, :] * K + start + k[:, None])
        acc = tl.dot(x, y, acc)
    tl.store(o_ptr + i[:, None] * BLOCK + i[None, :], acc)


def called(x=X, kernel=tuned, **kwargs):
    given = {"n": x.size, "out_type": jax.ShapeDtypeStruct(x.shape, x.dtype)} | kwargs
    grid = lambda meta: triton.cdiv(x.size, meta["BLOCK"])
    return jtops.triton_call(x, kernel=kernel, **({"grid": grid} | given))


def settled(f, *args, target="sm_90"):
    """The launch that tracing `f` emits: (constants and numbers by name, options by name)."""
    with jtops.config.target(target):  # a new function each time: JAX remembers traces
        call = jax.make_jaxpr(functools.partial(f))(*args).eqns[-1].params["call"]
    return {n: p.value for n, p in call.bound if hasattr(p, "value")}, dict(call.options)


@pytest.fixture(autouse=True)
def _own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("JTOPS_TUNING_DIR", str(tmp_path / "tuning"))
    cache.clear()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is not there, and the list of what was timed on it: the config named in `fastest` wins."""
    trials = types.SimpleNamespace(fastest="BLOCK=128", timed=[], real=timing.measure)

    def measure(calls, avals, device, updated):
        assert device is GPU
        trials.timed.append(list(calls))
        for f in calls.values():
            jax.eval_shape(f, *avals)
        return {label: 1e-6 if trials.fastest in label else 2e-6 for label in calls}

    monkeypatch.setattr(target, "present", lambda: GPU)
    monkeypatch.setattr(timing, "measure", measure)
    return trials


# ------------------------------------------------------------------------------------------------------------ candidates


@pytest.mark.spec("triton.runtime.Autotuner")
def test_values_with_every_config():
    for block in (None, 64, 128, 256):
        given = {} if block is None else {"BLOCK": block}
        np.testing.assert_array_equal(called(interpret=True, **given), X * 2)
    np.testing.assert_array_equal(jax.jit(functools.partial(called, interpret=True, SCALE=3))(X), X * 3)


def test_a_given_value_keeps_the_configs_that_have_it():
    values, options = settled(functools.partial(called, BLOCK=256), X)
    assert (values["BLOCK"], options["num_warps"]) == (256, 4)
    assert settle.decisions() == ()  # there was no choice
    with pytest.raises(ValueError, match=r"kernel scaled: no config of its @triton.autotune has BLOCK=96; they are BLOCK: 64.*"):
        called(BLOCK=96)


def test_tuned_values_by_position():
    f = lambda x: jtops.triton_call(x, x.size, 256, kernel=one_result_last, out_type=x, grid=16)
    assert settled(f, X)[0]["BLOCK"] == 256


@triton.autotune(configs, key=[])
@triton.jit
def one_result_last(x_ptr, n, BLOCK: tl.constexpr, o_ptr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def test_launch_options():
    """Those of the config; what the call says overrules them."""
    assert settled(called, X)[1] | {"x": 0} == {"num_warps": 2, "num_stages": 3, "num_ctas": 1, "enable_fp_fusion": True, "x": 0}
    assert settled(functools.partial(called, num_warps=8, BLOCK=128), X)[1]["num_warps"] == 8
    assert settled(functools.partial(called, backend_options={"num_stages": 1}), X)[1]["num_stages"] == 1
    kernel = triton.autotune([triton.Config({"BLOCK": 64}, maxnreg=32)], key=[])(plain)
    (compiled,) = lowered.kernels(functools.partial(called, kernel=kernel), X)
    assert ".maxnreg 32" in compiled.binary
    with pytest.raises(ValueError, match="num_warps=4 but backend_options has 8"):
        called(num_warps=4, backend_options={"num_warps": 8})


@pytest.mark.spec("early_config_prune / perf model prune")
def test_pruning():
    seen = {}

    def early(found, named, n, **kwargs):
        seen.update(named=dict(named), kwargs=kwargs, n=n)
        return [c for c in found if c.kwargs["BLOCK"] > 64]

    def model(BLOCK, num_warps, n, x_ptr, **_):
        seen["model"] = (n, x_ptr.shape, num_warps)
        return -BLOCK

    kernel = triton.autotune(configs, key=["n"], prune_configs_by={"early_config_prune": early})(plain)
    assert settled(functools.partial(called, kernel=kernel, SCALE=5), X)[0]["BLOCK"] == 128
    assert (seen["n"], seen["kwargs"]) == (4096, {"SCALE": 5})
    x, o = seen["named"]["x_ptr"], seen["named"]["o_ptr"]
    assert (x.shape, x.dtype, x.element_size(), x.numel(), x.stride(0), o.shape) == ((4096,), np.float32, 4, 4096, 1, (4096,))
    for top_k in (1, 0.4):
        kernel = triton.autotune(configs, key=["n"], prune_configs_by={"perf_model": model, "top_k": top_k})(plain)
        assert settled(functools.partial(called, kernel=kernel), X)[0]["BLOCK"] == 256
        assert seen["model"] == (4096, (4096,), 4)
    kernel = triton.autotune(configs, key=["n"], prune_configs_by={"early_config_prune": lambda *_, **__: []})(plain)
    with pytest.raises(ValueError, match="kernel scaled: early_config_prune left no config"):
        called(kernel=kernel)


@pytest.mark.spec("Heuristics")
@pytest.mark.spec("heuristic on num_warps")
def test_heuristics():
    """Evaluated with arguments by name, results and earlier heuristics included; launch options are launch options."""
    rules = {
        "BLOCK": lambda a: triton.next_power_of_2(a["n"]) // 4 + a["o_ptr"].ndim - 1,
        "num_warps": lambda a: 4 if a["BLOCK"] < 1024 else 8,
        "num_stages": lambda a: 1,
    }
    kernel = triton.heuristics(rules)(plain)
    for n, (block, warps) in {1000: (256, 4), 4096: (1024, 8)}.items():
        values, options = settled(functools.partial(called, kernel=kernel), X[:n])
        assert (values["BLOCK"], options["num_warps"], options["num_stages"]) == (block, warps, 1)
        np.testing.assert_array_equal(called(X[:n], kernel, interpret=True), X[:n] * 2)
    values, options = settled(functools.partial(called, kernel=kernel, BLOCK=128, num_warps=1), X)
    assert (values["BLOCK"], options["num_warps"]) == (128, 1)  # the call's word is the last
    with pytest.raises(KeyError, match="the heuristic for 'BLOCK' asks for 'size', but is given 'SCALE', 'n', 'o_ptr', 'x_ptr'"):
        called(kernel=triton.heuristics({"BLOCK": lambda a: a["size"]})(plain), n=3)
    with pytest.raises(TypeError, match=r"'BLOK' is neither a parameter of scaled\(.*Did you mean 'BLOCK'"):
        called(kernel=triton.heuristics({"BLOK": lambda a: 64})(plain), BLOCK=64, interpret=True)


def test_a_heuristic_may_take_a_keyword_that_the_kernel_has_not():
    kernel = triton.heuristics({"BLOCK": lambda a: 64 * a["factor"]})(plain)
    assert settled(functools.partial(called, kernel=kernel, factor=4), X)[0]["BLOCK"] == 256
    with pytest.raises(TypeError, match="'facto' is neither a parameter"):
        called(kernel=triton.heuristics({"BLOCK": lambda a: 64})(plain), facto=4)


@pytest.mark.spec("Autotuner over Heuristics")
def test_nesting():
    """Inner heuristics see each config; outer ones come first, and prune."""
    per_config = {"SCALE": lambda a: a["BLOCK"] * a["num_warps"]}
    inner = triton.autotune(configs, key=["n"])(triton.heuristics(per_config)(plain))
    for block, warps in ((64, 2), (128, 4), (256, 4)):
        assert settled(functools.partial(called, kernel=inner, BLOCK=block), X)[0]["SCALE"] == block * warps
        np.testing.assert_array_equal(called(kernel=inner, BLOCK=block, interpret=True), X * block * warps)
    outer = triton.heuristics({"BLOCK": lambda a: 256, "num_warps": lambda a: 1})(tuned)
    values, options = settled(functools.partial(called, kernel=outer), X)
    assert (values["BLOCK"], options["num_warps"]) == (256, 1)
    both = triton.heuristics({"BLOCK": lambda a: 128})(inner)
    assert settled(functools.partial(called, kernel=both), X)[0]["SCALE"] == 512


def test_a_grid_of_zero_and_empty_arrays():
    assert called(X[:0], n=0, interpret=True).shape == (0,)
    assert called(X[:0], n=0).shape == (0,)


# -------------------------------------------------------------------------------------------------------------- deciding


@pytest.mark.spec("TritonAutotunedKernelCall when >1 configs")
def test_one_plain_launch_is_emitted(gpu):
    """Of several configs, none but the settled one is in the program, so that it exports and is stored like any other."""
    assert lowered.launches(called, X) == {"scaled": 1}
    with jtops.config.target("sm_90"):
        exported = jax.export.export(jax.jit(called), platforms=("cuda",), disabled_checks=jtops.export_checks)(KIND)
    assert jax.export.deserialize(exported.serialize()).in_avals == exported.in_avals
    assert len(gpu.timed) == 1


@pytest.mark.spec("tuning before lowering, persisted, one answer for all hosts")
def test_the_fastest_is_remembered(gpu, tmp_path):
    """In memory, then on disk; one trial for one problem, and another for another."""
    assert settled(called, X)[0]["BLOCK"] == 128
    assert settled(called, X)[0]["BLOCK"] == 128
    assert len(gpu.timed) == 1
    assert len(gpu.timed[0]) == 3
    (decision,) = settle.decisions()
    assert (decision.source, decision.target, min(decision.seconds.values())) == ("timed", "sm_90", 1e-6)
    gpu.fastest = "BLOCK=64"
    cache.clear()
    assert settled(called, X)[0]["BLOCK"] == 128
    assert settle.decisions()[0].source == "table"
    assert settled(called, X[:1000])[0]["BLOCK"] == 64  # another value of the key
    assert settled(functools.partial(called, SCALE=3), X)[0]["BLOCK"] == 64  # another kernel
    assert settled(called, X.astype(jnp.bfloat16))[0]["BLOCK"] == 64
    assert len(gpu.timed) == 4
    assert len(list((tmp_path / "tuning").glob("*.json"))) == 4


def test_policies(gpu):
    with jtops.config.tuning("never"):
        assert settled(called, X)[0]["BLOCK"] == 64
        assert settle.decisions()[0].source == "first valid"
    assert settled(called, X)[0]["BLOCK"] == 128
    with jtops.config.tuning("never"):
        cache.clear()
        assert settled(called, X)[0]["BLOCK"] == 128  # the table is no trial
    gpu.fastest = "BLOCK=256"
    for policy, block, trials in (("cached", 128, 1), ("always", 256, 2), ("always", 256, 2)):
        with jtops.config.tuning(policy):
            assert settled(called, X)[0]["BLOCK"] == block
            assert len(gpu.timed) == trials
    f = jax.jit(called)
    for policy, block in (("cached", 128), ("always", 256)):  # a jitted function notices
        with jtops.config.tuning(policy), jtops.config.target("sm_90"):
            assert dict(f.trace(X).jaxpr.eqns[-1].params["call"].bound)["BLOCK"].value == block
    with pytest.raises(ValueError, match="jtops_tuning"):
        jtops.config.tuning("sometimes").__enter__()


def test_another_target_than_the_device_is_not_timed(gpu):
    assert settled(called, X, target="sm_80")[0]["BLOCK"] == 64
    assert gpu.timed == []
    f = functools.partial(called, compute_capability=80)
    assert settled(f, X)[0]["BLOCK"] == 64
    assert gpu.timed == []


def test_without_a_device_the_table_serves_the_architecture(gpu, monkeypatch, caplog):
    assert settled(called, X)[0]["BLOCK"] == 128
    monkeypatch.setattr(target, "present", lambda: None)
    cache.clear()
    assert settled(called, X)[0]["BLOCK"] == 128
    caplog.clear()
    for _ in range(2):
        assert settled(called, X, target="sm_80")[0]["BLOCK"] == 64
    (note,) = caplog.messages
    assert "scaled: not tuned for sm_80: the first valid config (BLOCK=64" in note


def test_export_and_import(gpu, tmp_path, monkeypatch):
    assert settled(called, X)[0]["BLOCK"] == 128
    assert settle.export_table(tmp_path / "table.json") == 1
    monkeypatch.setenv("JTOPS_TUNING_DIR", str(tmp_path / "other"))
    cache.clear()
    assert settle.import_table(tmp_path / "table.json") == 1
    gpu.fastest = "BLOCK=64"
    assert settled(called, X)[0]["BLOCK"] == 128
    for bad in ("{}", "[]", '{"decisions": [{"format": 1, "kernel": 3}]}'):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(ValueError, match=r"is not a table|lacks"):
            settle.import_table(tmp_path / "bad.json")


def test_a_hostile_table_adds_nothing(gpu, tmp_path, monkeypatch):
    """Case 113: a fingerprint becomes part of a file's name."""
    good = {"format": 1, "kernel": "k", "problem": "p", "fingerprint": "0" * 16, "device": "d", "config": "c", "seconds": {}}
    (tmp_path / "tuning" / "k").mkdir(parents=True)
    for fingerprint in ("/../../../x/NAME", "../" * 9, "0" * 15, "0" * 16 + "\n", ""):
        (tmp_path / "bad.json").write_text(json.dumps({"decisions": [good, good | {"fingerprint": fingerprint}]}))
        with pytest.raises(ValueError, match="fingerprint must be 16 hexadecimal digits"):
            settle.import_table(tmp_path / "bad.json")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [tmp_path / "bad.json"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_mode_that_umask_says(mask, mode, tmp_path):
    """Case 73: a directory of tables is shared."""
    before = os.umask(mask)
    try:
        tuning_table.store({"format": 1, "kernel": "k", "problem": "p", "fingerprint": "0" * 16, "device": "d",
                            "config": "c", "seconds": {}})  # fmt: skip
        tuning_table.export_table(tmp_path / "table.json")
    finally:
        os.umask(before)
    paths = [*(tmp_path / "tuning").iterdir(), tmp_path / "table.json"]
    assert [p.stat().st_mode & 0o777 for p in paths] == [mode, mode]


def test_without_a_home(gpu, monkeypatch, caplog):
    """Case 65: what is found cannot be kept, and is used."""
    for name in ("JTOPS_TUNING_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(tuning_table.Path, "home", home)
    assert settled(called, X)[0]["BLOCK"] == 128
    assert [len(t) for t in gpu.timed] == [3]
    (said,) = [m for m in caplog.messages if "JTOPS_TUNING_DIR" in m]
    assert "cannot be written" in said
    with jtops.config.target("sm_90"):
        assert jtops.explain(jtops.softmax, X)[0].config == "heuristic"


def test_damaged_and_stale_entries(gpu, tmp_path, caplog):
    assert settled(called, X)[0]["BLOCK"] == 128
    (path,) = (tmp_path / "tuning").glob("*.json")
    whole = path.read_text()
    gpu.fastest = "BLOCK=256"
    for text in ("", whole[: len(whole) // 2], "[]", json.dumps(json.loads(whole) | {"config": "BLOCK=7"})):
        path.write_text(text)
        cache.clear()
        assert settled(called, X)[0]["BLOCK"] == 256
        assert json.loads(path.read_text())["config"].startswith("BLOCK=256")  # written anew
    changed = triton.autotune(configs[1:], key=["n"])(plain)
    caplog.clear()
    for _ in range(2):
        cache.clear()
        assert settled(functools.partial(called, kernel=changed), X)[0]["BLOCK"] == 256
    assert [m for m in caplog.messages if "has changed since it was tuned" in m]


def test_a_table_that_cannot_be_written(gpu, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JTOPS_TUNING_DIR", str(tmp_path / "file" / "below"))
    assert settled(called, X)[0]["BLOCK"] == 128
    assert "Set JTOPS_TUNING_DIR" in caplog.text


def test_explain_shows_what_is_emitted_alone():
    with jtops.config.target("sm_90"):
        text = str(jtops.explain(called, X))
    assert text.count("BLOCK=64") == 1


@triton.jit
def asserting(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 256, "too large")
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


def test_configs_that_do_not_compile_are_skipped(gpu, caplog):
    """Case 42."""
    gpu.fastest = "BLOCK=256"
    kernel = triton.autotune([configs[2], configs[0], configs[1]], key=[])(asserting)
    assert settled(functools.partial(called, kernel=kernel), X)[0]["BLOCK"] == 64
    assert [len(t) for t in gpu.timed] == [2]
    assert "config (BLOCK=256, num_ctas=1, num_stages=3, num_warps=4) is skipped: kernel asserting does not compile" in caplog.text
    with jtops.config.tuning("never"):
        assert settled(functools.partial(called, kernel=kernel), X)[0]["BLOCK"] == 64


def test_the_interpreter_skips_what_the_compiler_skips():
    """Case 78f. Where no config compiles, the first is interpreted, which says what is wrong with it."""
    kernel = triton.autotune([configs[2], configs[0], configs[1]], key=[])(asserting)
    np.testing.assert_array_equal(called(kernel=kernel, interpret=True), X)
    np.testing.assert_array_equal(jax.jit(lambda x: called(x, kernel, interpret=True))(X), X)
    none = triton.autotune([triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 512})], key=[])(asserting)
    with pytest.raises(Exception, match="too large"):
        jax.block_until_ready(called(kernel=none, interpret=True))


def test_what_a_heuristic_may_ask_of_an_array():
    """Case 78g."""
    rules = lambda f: triton.heuristics({"BLOCK": f})(plain)
    np.testing.assert_array_equal(called(kernel=rules(lambda a: 64 * a["x_ptr"].is_contiguous()), interpret=True), X * 2)
    for name, rule in {"data_ptr": lambda a: a["x_ptr"].data_ptr(), "device": lambda a: a["o_ptr"].device}.items():
        with pytest.raises(jtops.UnsupportedError, match=f"kernel scaled: the heuristic for 'BLOCK' uses '{name}' of an array"):
            called(kernel=rules(rule), interpret=True)
    prune = lambda configs, named, **_: [c for c in configs if named["x_ptr"].device]
    pruned = triton.autotune(configs, key=[], prune_configs_by={"early_config_prune": prune})(plain)
    with pytest.raises(jtops.UnsupportedError, match="kernel scaled: early_config_prune or perf_model uses 'device'"):
        called(kernel=pruned, interpret=True)


def test_configs_that_do_not_fit_are_skipped(gpu):
    """Case 42: shared memory. If none fits, one error names the kernel, each config, and bytes needed and there."""
    kind = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    some = [triton.Config({}, num_warps=4, num_stages=stages) for stages in (12, 14, 2)]

    def f(configs):
        kernel = triton.autotune(configs, key=[])(product_kernel)
        call = lambda x: jtops.triton_call(x, kernel=kernel, K=1024, out_type=kind, grid=1)
        return settled(call, jnp.ones((64, 1024), jnp.float16), target="sm_86")

    assert f(some)[1]["num_stages"] == 2
    with pytest.raises(jtops.errors.KernelCompileError) as error:
        f(some[:2])
    message = str(error.value)
    assert "product_kernel: none of its 2 configs is valid for sm_86" in message
    for stages in (12, 14):
        assert f"(num_ctas=1, num_stages={stages}, num_warps=4): kernel product_kernel: needs " in message
    assert message.count("bytes of shared memory, sm_86 has 101376") == 2


def test_a_mistake_in_the_call_is_not_a_bad_config(gpu):
    with pytest.raises(TypeError, match="'SCAL' is neither a parameter"):
        settled(functools.partial(called, SCAL=3), X)
    with pytest.raises(ValueError, match="out_type has 2 outputs"):
        settled(functools.partial(called, out_type=(X, X)), X)


def test_configs_compile_at_the_same_time(gpu, monkeypatch):
    """Every config waits for another one to begin."""
    together = threading.Barrier(2, timeout=60)
    real = triton_compat.triton.compile

    def waiting(*args, **kwargs):
        together.wait()
        return real(*args, **kwargs)

    monkeypatch.setattr(triton_compat.triton, "compile", waiting)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    kernel = triton.autotune([triton.Config({"BLOCK": b, "SCALE": 77}) for b in (64, 128)], key=[])(plain)
    assert settled(functools.partial(called, kernel=kernel), X)[0]["BLOCK"] == 128
    assert cache.statistics().compiled + cache.statistics().disk_hits == 2


@pytest.mark.spec("thread use (kernel call from worker thread)")
def test_threads_decide_once(gpu):
    """Case 49: eight threads ask for one new kernel at the same time."""
    start, found, errors = threading.Barrier(8), [], []

    def work():
        try:
            start.wait()
            found.append(settled(called, X)[0]["BLOCK"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert (errors, found, len(gpu.timed)) == ([], [128] * 8, 1)


def test_inside_transformed_code(gpu):
    """The trial sees nothing of the traces around the call, nor of settings that would break it."""
    f = jax.jit(lambda x: jax.lax.scan(lambda c, _: (called(c), None), x, None, length=2)[0])
    with jtops.config.target("sm_90"), jax.debug_nans(True):
        f.trace(X)
    with jax.enable_x64(True):
        wide = jnp.zeros(64, jnp.float64)
        assert settled(called, wide)[0]["BLOCK"] == 128
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    with jtops.config.target("sm_90"):
        jax.jit(jax.shard_map(called, mesh=mesh, in_specs=spec, out_specs=spec)).trace(X)
    assert len(gpu.timed) == 3
    assert settle.decisions()[-1].kernel.endswith("scaled")


@pytest.mark.spec("autotuner pre_hook")
def test_hooks_see_the_call(gpu):
    """A config's hook runs with all arguments by name; what it cannot do here it says."""
    seen = []
    hooked = [triton.Config({"BLOCK": 64}, pre_hook=lambda a: seen.append((a["n"], a["BLOCK"], a["x_ptr"].shape)))]
    values, _ = settled(functools.partial(called, kernel=triton.autotune(hooked, key=[])(plain)), X)
    assert values["BLOCK"] == 64
    assert seen == [(4096, 64, (4096,))]
    for hook, match in (
        (lambda a: a["x_ptr"].zero_(), "a pre_hook zeroes 'x_ptr', an argument of the call"),
        (lambda a: a["o_ptr"].fill_(1), "may zero an array, not fill it with 1"),
        (lambda a: a["o_ptr"].data_ptr(), "its pre_hook uses 'data_ptr' of an array"),
    ):
        kernel = triton.autotune([triton.Config({"BLOCK": 64}, pre_hook=hook)], key=[])(plain)
        with pytest.raises(jtops.UnsupportedError, match=match):
            called(kernel=kernel, interpret=True)
    kernel = triton.autotune(configs, key=[], restore_value=["x_ptr"], post_hook=lambda *_, **__: None)(plain)
    assert settled(functools.partial(called, kernel=kernel), X)[0]["BLOCK"] == 128
    with pytest.raises(ValueError, match="y_ptr"):
        called(kernel=triton.autotune(configs, key=[], reset_to_zero=["y_ptr"])(plain))


# ------------------------------------------------------------------------------------------------------ changed in place


@triton.jit
def counting(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(o_ptr, tl.sum(tl.load(x_ptr + i, mask=i < n, other=0.0)))


@triton.jit
def doubling(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


ZEROING = {
    "reset_to_zero": triton.autotune(configs, key=["n"], reset_to_zero=["o_ptr"])(counting),
    "pre_hook": triton.autotune(configs, key=["n"], pre_hook=lambda a, reset_only=False: a["o_ptr"].zero_())(counting),
    "config hook": triton.autotune(
        [triton.Config(c.kwargs, num_warps=c.num_warps, pre_hook=lambda a: a["o_ptr"].zero_()) for c in configs], key=["n"]
    )(counting),
    "the call": triton.autotune(configs, key=["n"])(counting),
}
MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("how", ZEROING)
def test_zeroed_results(how, interpret):
    """Case 41: zeros in the trials and in every launch, whoever asked for them."""
    ones, out = jnp.ones(1000), jax.ShapeDtypeStruct((1,), jnp.float32)
    more = {"zeroed_outputs": (0,)} if how == "the call" else {}
    f = jax.jit(lambda x: called(x, ZEROING[how], out_type=out, interpret=interpret, **more))
    for _ in range(3):
        assert f(ones)[0] == 1000
    if how != "the call":  # with the caller's own, by function
        g = functools.partial(called, kernel=ZEROING[how], out_type=out, interpret=interpret, zeroed_outputs=lambda meta: [0])
        assert g(ones)[0] == 1000


@pytest.mark.spec("aliasing/Ref with autotune")
@pytest.mark.parametrize("interpret", MODES)
def test_in_place(interpret):
    """Trials change arrays of their own: the caller's is doubled once."""
    kernel = triton.autotune(configs, key=["n"], restore_value=["x_ptr"])(doubling)
    given = {"grid": lambda meta: triton.cdiv(300, meta["BLOCK"]), "n": 300, "kernel": kernel, "interpret": interpret}
    x = jnp.arange(300.0)
    for _ in range(2):
        np.testing.assert_array_equal(jtops.triton_call(x, out_type=x, input_output_aliases={0: 0}, **given), x * 2)

    @jax.jit
    def through_a_ref(x):
        ref = jax.new_ref(x)
        jtops.triton_call(ref, out_type=(), **given)
        return ref[...]

    np.testing.assert_array_equal(through_a_ref(x), x * 2)


def test_trials_in_place(gpu, monkeypatch):
    """Both ways of changing an array, and zeroed results, in trials that really run: here by the interpreter, on the CPU."""
    real, function, found, changed = gpu.real, settle._Question.function, [], []

    def measure(calls, avals, device, updated):
        changed.append(updated)
        found.append(real(calls, avals, jax.devices()[0], updated))
        return found[-1]

    def interpreted(problem, candidate, **changes):
        return function(problem, candidate, **(changes | {"interpret": True} if changes else {}))

    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(timing, "CHAIN", 2)
    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(settle._Question, "function", interpreted)
    kernel = triton.autotune(configs[:2], key=["n"])(doubling)
    given = {"grid": lambda meta: triton.cdiv(128, meta["BLOCK"]), "n": 128, "kernel": kernel}
    x = jnp.arange(128.0)

    def through_a_ref(x):
        ref = jax.new_ref(x)
        jtops.triton_call(ref, out_type=(), **given)
        return ref[...]

    with jtops.config.tuning("always"), jtops.config.target("sm_90"):
        jax.make_jaxpr(lambda x: jtops.triton_call(x, out_type=x, input_output_aliases={0: 0}, **given))(x)
        cache.clear()
        jax.make_jaxpr(through_a_ref)(x)
        jax.make_jaxpr(lambda x: called(x, ZEROING["config hook"], out_type=jax.ShapeDtypeStruct((1,), jnp.float32)))(x)
    assert [len(f) for f in found] == [2, 2, 3]
    assert changed == [[0], [0], []]
    assert all(isinstance(seconds, float) for f in found for seconds in f.values())
    np.testing.assert_array_equal(x, jnp.arange(128.0))


def test_trials_in_place_share_one_scratch_array():
    """Case 111: a large array is there once, whatever the number of configs, and each call finds the same values in it."""
    aval = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
    trial = timing.Trial([aval, aval], [1])
    programs = [trial.program(lambda x, y: ([x], [y * 2]), 1), trial.program(lambda x, y: ([x], [y + y]), 1)]
    before = None
    for program in programs * 2:
        _, (after,) = program()
        np.testing.assert_array_equal(after, timing.noise(1, aval) * 2)
        assert before is None or before.is_deleted()
        before = after

    def fails(x, y):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    with pytest.raises(jax.errors.JaxRuntimeError):
        trial.program(fails, 1)()
    np.testing.assert_array_equal(programs[0]()[1][0], timing.noise(1, aval) * 2)  # made anew


@triton.jit
def second_doubled(y_ptr, SCALE: tl.constexpr, x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * SCALE + 0 * tl.load(y_ptr + i, mask=i < n), mask=i < n)


def test_memory_that_does_not_suffice_for_trials(gpu, monkeypatch):
    """Case 111: the error says what to do. Aliases count the operands in the order of the parameters, however they are given."""
    changed = []

    def measure(calls, avals, device, updated):
        changed.append([avals[i].dtype for i in updated])
        return dict.fromkeys(calls, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))

    monkeypatch.setattr(timing, "measure", measure)
    kernel = triton.autotune(configs, key=["n"])(second_doubled)
    given = {"grid": 1, "n": 4096, "kernel": kernel, "input_output_aliases": {1: 0}, "SCALE": 2}
    half = X.astype(jnp.bfloat16)
    for args, named in (((half,), {"x_ptr": X}), ((), {"x_ptr": X, "y_ptr": half}), ((half, X), {})):
        with pytest.raises(jtops.errors.JtopsError, match="beside those of the program: tune before they are made"):
            settled(lambda args=args, named=named: jtops.triton_call(*args, out_type=X, **given, **named))
    assert changed == [[jnp.float32]] * 3


@triton.jit
def batched(x_ptr, x_batch, o_ptr, o_batch, n, BLOCK: tl.constexpr):
    i, b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    tl.store(o_ptr + b * o_batch + i, tl.load(x_ptr + b * x_batch + i, mask=i < n) + 1, mask=i < n)


@pytest.mark.parametrize("interpret", MODES)
def test_under_vmap_and_over_shards(interpret):
    """The config is settled for one call, whatever is mapped over it; a sharding rule gives each device its own call."""
    kernel = triton.autotune(configs, key=["n"], reset_to_zero=["o_ptr"])(batched)
    method = jtops.GridBatch(axis=1, strides={"x_ptr": "x_batch", "o_ptr": "o_batch"})
    f = lambda x: called(x, kernel, vmap_method=method, interpret=interpret)
    x = jnp.arange(600.0).reshape(3, 200)
    np.testing.assert_array_equal(jax.jit(jax.vmap(f))(x), x + 1)
    np.testing.assert_array_equal(jax.vmap(lambda x: called(x, vmap_method="sequential", interpret=interpret))(x), x * 2)
    rule = jtops.ShardingRule("r -> r", split="r")
    grid = lambda meta: triton.cdiv(meta["r"], meta["BLOCK"])
    g = lambda x: called(x, n=lambda axes: axes["r"], sharding_rule=rule, interpret=interpret, grid=grid)
    np.testing.assert_array_equal(jax.jit(g)(x.reshape(600)), x.reshape(600) * 2)


@triton.jit
def described(x_desc, o_desc, BLOCK: tl.constexpr):
    o_desc.store([tl.program_id(0) * BLOCK], x_desc.load([tl.program_id(0) * BLOCK]) + 1)


def test_a_hook_may_set_the_blocks_of_descriptors(gpu):
    def blocks(a):
        a["x_desc"].block_shape = a["o_desc"].block_shape = [a["BLOCK"]]

    some = [triton.Config({"BLOCK": b}, pre_hook=blocks) for b in (64, 128)]
    kernel = triton.autotune(some, key=[])(described)
    seen = jtops.TensorDescriptor.from_array(X, [16])
    out = jtops.TensorDescriptor.from_array(KIND, [16])
    call = lambda x: jtops.triton_call(
        jtops.TensorDescriptor.from_array(x, [16]), kernel=kernel, out_type=out, grid=lambda meta: 4096 // meta["BLOCK"]
    )
    with jtops.config.target("sm_90"):
        bound = dict(jax.make_jaxpr(call)(X).eqns[-1].params["call"].bound)
    assert (bound["x_desc"].block_shape, bound["o_desc"].block_shape, bound["BLOCK"].value) == ((128,), (128,), 128)
    assert out.block_shape == seen.block_shape == (16,)  # the caller's own stay as they are


# -------------------------------------------------------------------------------------------------------------- processes


class Store:
    """jax.distributed's key-value store, shared by the processes of a test that are none."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]


def test_process_0_decides(gpu, monkeypatch, tmp_path):
    store, this = Store(), 0
    monkeypatch.setattr(jax_compat, "distributed_client", lambda: (store, this))

    def process(number):
        nonlocal this
        this = number
        cache.clear()
        monkeypatch.setattr(processes, "_asked", {})
        monkeypatch.setenv("JTOPS_TUNING_DIR", str(tmp_path / f"of host {number}"))

    process(1)
    with pytest.raises(jtops.errors.JtopsError, match="process 1 heard no config from process 0 in 600 s"):
        settled(called, X)
    twins = [triton.autotune(configs[:k], key=["n"])(plain) for k in (3, 2)]  # as from a factory: one name, two kernels
    process(0)
    assert [settled(functools.partial(called, kernel=k), X)[0]["BLOCK"] for k in twins] == [128, 128]
    gpu.fastest = "BLOCK=256"
    process(1)
    assert [settled(functools.partial(called, kernel=k), X)[0]["BLOCK"] for k in twins] == [128, 128]
    assert len(gpu.timed) == 2
    assert {d.source for d in settle.decisions()} == {"process 0"}
    process(1)
    with pytest.raises(jtops.errors.JtopsError, match="process 0 runs another version of it than process 1"):
        settled(functools.partial(called, kernel=triton.autotune(configs[1:], key=["n"])(plain)), X)
    broken = triton.autotune([triton.Config({"BLOCK": b}) for b in (256, 512)], key=[])(asserting)
    for number, match in ((0, "none of its 2 configs"), (1, "process 0 found no config: .*none of its 2 configs")):
        process(number)
        with pytest.raises(jtops.errors.JtopsError, match=match):
            settled(functools.partial(called, kernel=broken), X)


DISTRIBUTED = """
import sys, jax
process, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
from jtops.core import target
from jtops.core.tuning import processes, settle, timing
from jtops.errors import JtopsError
from tests.core import test_autotune as t
target.present = lambda: t.GPU
timing.measure = lambda calls, *_: {name: float("BLOCK=256" not in name) for name in calls} if process == 0 else 1 / 0
print(t.settled(t.called, t.X)[0]["BLOCK"], settle.decisions()[0].source)
if process == 1:
    processes.TIMEOUT_SECONDS = 1
    try:
        t.settled(t.called, t.X[:77])
    except JtopsError as error:
        print(error)
else:
    import time; time.sleep(5)
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    """The real key-value store: process 1 takes what process 0 timed, and does not wait for ever."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-W", "ignore", "-c", DISTRIBUTED]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([*command, str(i), port], env=env | {"JTOPS_TUNING_DIR": str(tmp_path / str(i))}, **pipes)
        for i in range(2)
    ]
    said = [p.communicate(timeout=300) for p in started]
    assert said[0][0] == "256 timed\n", said[0][1][-2000:]
    assert said[1][0].startswith("256 process 0\n"), said[1][1][-2000:]
    assert "process 1 heard no config from process 0 in 1 s" in said[1][0]


IMPORTING = """
import os
import triton, triton.language as tl
from triton.runtime.driver import driver
from tests.core import test_autotune as module
assert driver._active is None, "importing autotuned kernels touched the GPU driver"
import jax
from jax._src import xla_bridge
text = module.lowered.text(module.called, jax.ShapeDtypeStruct((4096,), "float32"))
assert driver._active is None, "settling a config touched the GPU driver"
print(hash(text) if False else len(text), module.settled(module.called, module.X)[0]["BLOCK"])
"""


@pytest.mark.slow
def test_importing_touches_no_driver(gpu, tmp_path):
    """Case 51; and what one process tuned, another one without a GPU uses, to the same bytes of program."""
    assert settled(called, X)[0]["BLOCK"] == 128
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    outputs = [
        subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTING], capture_output=True, text=True, env=env, check=False)
        for _ in range(2)
    ]
    assert outputs[0].stdout.split()[-1:] == ["128"], outputs[0].stderr[-2000:]
    assert outputs[0].stdout == outputs[1].stdout


def test_many_writers_of_one_table(tmp_path):
    """Files are whole at every moment."""
    entry = {
        "format": 1,
        "kernel": "k",
        "problem": "p",
        "fingerprint": "f" * 16,
        "device": "d",
        "config": "c" * 5000,
        "seconds": {},
    }
    stop = threading.Event()

    def write():
        while not stop.is_set():
            tuning_table.store(entry)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for w in writers:
        w.start()
    tuning_table.store(entry)
    deadline, reads = time.monotonic() + 0.5, 0
    while time.monotonic() < deadline:
        assert tuning_table.load("k", "p", "f" * 16, "d") == entry
        reads += 1
    stop.set()
    for w in writers:
        w.join()
    assert reads > 5
    assert [p.suffix for p in (tmp_path / "tuning").iterdir()] == [".json"]


def test_timing_on_any_device(monkeypatch):
    """The measuring itself, on the CPU: order and failures are seen; operands are made to shape and type."""
    avals = [jax.ShapeDtypeStruct((64, 64), d) for d in (jnp.float32, jnp.int32, jnp.bool_, jnp.bfloat16)]
    floats, integers, bools, _ = (timing.noise(i, aval) for i, aval in enumerate(avals))
    assert 0.9 < float(abs(floats).max()) <= 1
    assert len(np.unique(np.asarray(floats))) > 4000
    assert not integers.any()
    assert bools.all()
    monkeypatch.setattr(timing, "CHAIN", 2)
    small = lambda x, *_: (x + 1, [])
    large = lambda x, *_: (jax.lax.fori_loop(0, 100, lambda _, y: y @ x, x), [])
    found = timing.measure({"large": large, "small": small}, avals, jax.devices()[0])
    assert 0 < found["small"] < found["large"]


# -------------------------------------------------------------------------------------------------------------- on a GPU


@triton.autotune([triton.Config({"BLOCK": 256, "ROUNDS": r}) for r in (5000, 1, 1000)], key=["n"])
@triton.jit
def slowed(x_ptr, o_ptr, n, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    for _ in range(ROUNDS):
        x = tl.sin(x)
    tl.store(o_ptr + i, x, mask=i < n)


@pytest.mark.gpu
def test_the_fastest_wins_on_the_gpu():
    x = jnp.linspace(-1.0, 1.0, 100_000)
    for _ in range(2):
        np.testing.assert_allclose(jax.jit(functools.partial(called, kernel=slowed))(x), jnp.sin(x), rtol=1e-5, atol=1e-6)
    (decision,) = settle.decisions()
    assert (decision.source, len(decision.seconds)) == ("timed", 3)
    assert "ROUNDS=1" in decision.config.split(", ")


@pytest.mark.gpu
def test_invalid_configs_on_the_gpu():
    """Case 42: what does not fit is skipped, and leaves no error behind."""
    x, kind = jnp.ones((64, 2048), jnp.float16), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    some = [triton.Config({}, num_warps=4, num_stages=stages) for stages in (24, 2, 3)]
    kernel = triton.autotune(some, key=[])(product_kernel)
    got = jax.jit(lambda x: jtops.triton_call(x, kernel=kernel, K=2048, out_type=kind, grid=1))(x)
    np.testing.assert_array_equal(got, np.full((64, 64), 2048.0))
    assert len(settle.decisions()[0].seconds) == 2


@pytest.mark.gpu
def test_a_loop_of_launches():
    """XLA captures the loop's launches into a CUDA graph."""
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: called(y), x))
    g = jax.jit(lambda x: functools.reduce(lambda y, _: called(y), range(10), x))
    for _ in range(3):
        np.testing.assert_array_equal(f(X), X * 1024)
        np.testing.assert_array_equal(g(X), X * 1024)


@pytest.mark.gpu
def test_a_tuned_kernel_exports():
    exported = jax.export.export(jax.jit(called), platforms=("cuda",), disabled_checks=jtops.export_checks)(KIND)
    np.testing.assert_array_equal(jax.export.deserialize(exported.serialize()).call(X), X * 2)
    assert settle.decisions()[0].source == "timed"


@pytest.mark.gpu
def test_threads_on_the_gpu():
    """Case 49: the first call of one tuned kernel, eight times at once; then from a fresh thread."""
    start, found, errors = threading.Barrier(8), [], []

    def work(wait=True):
        try:
            if wait:
                start.wait()
            found.append(np.asarray(jax.jit(functools.partial(called))(X)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    late = threading.Thread(target=work, args=(False,))
    late.start()
    late.join()
    assert errors == []
    assert len(found) == 9
    for got in found:
        np.testing.assert_array_equal(got, X * 2)
    assert len(settle.decisions()) == 1


PROCESS = """
import collections
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name]))
import numpy as np
from jtops.core.tuning import settle
from tests.core import test_autotune as t
np.testing.assert_array_equal(jax.jit(t.called)(t.X), t.X * 2)
(decision,) = settle.decisions()
print(decision.source, "/", decision.config, "/", events["/jax/compilation_cache/cache_misses"])
"""


@pytest.mark.gpu
def test_the_next_process(tmp_path):
    """It takes the config from the table and, as the program is the same, the program from JAX's persistent cache."""
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    said = []
    for _ in range(2):
        run = subprocess.run([sys.executable, "-W", "ignore", "-c", PROCESS], capture_output=True, text=True, env=env, check=False)
        assert run.returncode == 0, run.stderr[-3000:]
        said.append(run.stdout.strip().split(" / "))
    assert [s[0] for s in said] == ["timed", "table"]
    assert said[0][1] == said[1][1]
    assert int(said[0][2]) > 0
    assert said[1][2] == "0"


@pytest.mark.multigpu
def test_on_the_device_of_the_data():
    """Case 59."""
    f = jax.jit(functools.partial(called))
    for device in (*jax.devices()[:2], jax.devices()[0]):
        y = f(jax.device_put(X, device))
        assert y.devices() == {device}
        np.testing.assert_array_equal(y, X * 2)
