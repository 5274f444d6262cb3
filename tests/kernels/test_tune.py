"""jtops.tune: which choices it finds, how it climbs, what it writes. Times are made up, except those of the last test."""

import contextlib
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtops
from jtops import tune
from jtops.core import cache, target
from jtops.core.tuning import table as tuning_table
from jtops.core.tuning import timing
from jtops.errors import JtopsError, KernelCompileError, UnsupportedError
from jtops.kernels._lib.frame import tuned
from jtops.kernels._lib.frame.config import Config
from tests import programs

X = jnp.linspace(-1, 1, 4 * 48).reshape(4, 48)
GPU = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0", platform="gpu")


@pytest.fixture(autouse=True)
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("JTOPS_TUNING_DIR", str(tmp_path / "tuning"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    cache.clear()


def loaded(path):
    return tuning_table.parsed(path, path.read_text())


def found(f, *args):
    """The choices of a program for sm_90, as op and stage."""
    with jtops.config.target("sm_90"):
        results = tune.tune(f, *args, dry_run=True, progress=lambda _: None)
    return sorted(f"{r.problem.op} {r.problem.choice}" for r in results)


def test_choices_wherever_they_are():
    """Below jit, scan, cond, remat, custom rules, vmap and shard_map; in the gradient of them."""
    nested = programs.nested(lambda x, _: jtops.logsumexp(jtops.log_softmax(x), axis=-1))
    forward = ["layer_norm out", "log_softmax out", "logsumexp out", "rms_norm out", "softmax out"]
    assert found(nested, X) == forward
    both = found(jax.grad(nested), X)
    assert {"softmax vjp", "rms_norm vjp", "log_softmax vjp", "logsumexp vjp", "softmax out", "rms_norm fwd"} <= set(both)
    assert found(jax.vmap(jtops.softmax), X) == ["softmax out"]
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    in_parts = jax.shard_map(jtops.softmax, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    assert found(in_parts, jax.device_put(X, NamedSharding(mesh, P("a")))) == ["softmax out"]
    assert found(jax.hessian(lambda x: jtops.softmax(x).sum()), X[0]) == ["softmax out", "softmax vjp"]


def test_calls_without_a_kernel_have_no_choice():
    assert found(lambda x: jtops.softmax(x, implementation="xla"), X) == []
    assert found(lambda x: jtops.softmax(x, implementation="interpret"), X) == []
    assert found(jtops.softmax, jnp.ones((0, 4))) == []
    with jax.enable_x64(True):
        assert found(jtops.softmax, jnp.ones((4, 4), jnp.float64)) == []


def test_several_choices_of_a_stage():
    q = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.bfloat16)
    attention = jax.grad(lambda q, k, v: jtops.flash_attention(q, k, v).sum().astype("float32"), (0, 1, 2))
    names = [f"flash_attention portable.{name}" for name in ("out", "vjp_dkdv", "vjp_dq")]
    assert found(attention, q, q, q) == names
    q = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)  # Hopper's backward has no other tiles
    assert found(attention, q, q, q) == ["flash_attention hopper.out"]
    w = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    loss = lambda a, b: jtops.matmul(a, b, activation="relu").sum().astype("float32")
    assert found(jax.grad(loss, (0, 1)), w, w) == ["matmul fwd", "matmul vjp_da", "matmul vjp_db"]


STARTS = [
    Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=None, num_warps=8),
    Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=256, num_warps=8, num_stages=1),
    Config(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, num_warps=8, num_stages=3),
    Config(BLOCK_M=1, BLOCK_N=1, num_warps=1),
    Config(BLOCK_N=128, WARPGROUPS=2, num_stages=2),
]


@pytest.mark.parametrize("start", STARTS, ids=repr)
def test_neighbours(start):
    around = tune.neighbours(start)
    assert start not in around
    assert len(set(around)) == len(around) > 3
    for new in around:
        assert new.blocks.keys() == start.blocks.keys()
        changed = {k for k in new.kwargs if new[k] != start[k]}
        assert 1 <= len(changed) <= 2, new
    if "WARPGROUPS" in start.blocks:  # one more or less, of as many warps as there are in each
        assert {c["WARPGROUPS"] for c in around} == {1, 2, 3}
        assert {c["num_warps"] for c in around} == {4}


# ------------------------------------------------------------------------------------------------- on a GPU that is not there


@pytest.fixture
def gpu(monkeypatch):
    """Stages run in the interpreter; a config takes so many microseconds as `cost` says, and may be made wrong or to fail."""
    trials = types.SimpleNamespace(cost=lambda c: 100, wrong=lambda c: False, fails=lambda c: False, raced=[])
    real = tune._stage

    def stage(call, platform):
        if platform != "cpu":
            return real(call, platform)

        def f(*arrays):
            (config,) = tuned._local.forced.values()
            if trials.fails(config):
                raise KernelCompileError("it does not fit")
            outs = real(call.to(call.stage, implementation="interpret"), platform)(*arrays)
            return [o * 1.1 if trials.wrong(config) else o for o in outs]

        return f

    def race(programs):
        trials.raced.append(list(map(repr, programs)))
        return {config: 1e-6 * trials.cost(config) for config in programs}

    monkeypatch.setattr(target, "present", lambda: GPU)
    monkeypatch.setattr(tune, "_stage", stage)
    monkeypatch.setattr(tune._Trial, "platform", "cpu")
    monkeypatch.setattr(timing, "race", race)
    monkeypatch.setattr(jax, "default_device", lambda _: jax.enable_x64(False))
    with jtops.config.target("sm_90"):
        yield trials


def prepared(task, device=GPU):
    """A trial whose steps are all done here."""
    trial, errors = tune._Trial(task, device), None
    steps = trial.prepare()
    with contextlib.suppress(StopIteration):
        while True:
            errors = [build() for build in steps.send(errors)]
    return trial


def f(x):
    return jtops.add(x, 1.0)  # two blocks: few neighbours


def tuned_now():
    (task,) = tune._tasks(f, (X,), "cuda")
    return task.now


TABLE = "ops/NVIDIA_H200.json"


def test_it_climbs_and_writes_and_the_table_is_read(gpu, tmp_path):
    """To the best of a slope, some steps away."""
    start = tuned_now()
    gpu.cost = lambda c: 100 + 20 * c["BLOCK_M"] + abs(c["BLOCK_N"] - 64)
    said = []
    (result,) = tune.tune(f, X, progress=said.append)
    assert (result.said, result.config["BLOCK_M"], result.config["BLOCK_N"]) == ("tuned", 1, 64)
    assert (result.seconds, result.heuristic_seconds) == pytest.approx((120e-6, 420e-6))
    assert said == [str(result)]
    assert "add out float32,float32" in said[0]
    assert len(gpu.raced) == 6  # two steps at once, then one by one, the last round, and both once more
    assert set(gpu.raced[-1]) == {repr(start), repr(result.config)}
    assert start.source == "heuristic"
    assert tuned_now() == result.config
    assert tuned_now().source == "tuned table (user)"
    (entry,) = loaded(tmp_path / "tuning" / TABLE).entries.values()
    assert entry.config["BLOCK_M"] == 1
    # Tuned again without time to climb, it stays; where nothing is gained any more, it goes.
    (again,) = tune.tune(f, X, budget=1e-3, progress=said.append)
    assert (again.said, again.config) == ("tuned", result.config)
    gpu.cost = lambda c: 100 if c == start else 99
    assert [r.said for r in tune.tune(f, X, progress=said.append)] == ["heuristic"]
    assert tuned_now() == start


def test_small_gains_are_not_written(gpu, tmp_path):
    gpu.cost = lambda c: 97.5 if c["BLOCK_M"] == 8 else 100
    (result,) = tune.tune(f, X, progress=lambda _: None)
    assert (result.said, result.config.source) == ("heuristic", "heuristic")
    assert (result.seconds, result.heuristic_seconds) == pytest.approx((100e-6, 100e-6))
    assert not (tmp_path / "tuning" / TABLE).exists()


def test_entries_are_checked_and_the_slower_are_deleted(gpu, tmp_path):
    """No other config is tried; what is up to 2 % slower than the heuristic's stays, with its times of now."""
    path, quiet = tmp_path / "table.json", {"progress": lambda _: None}
    assert tune.tune(f, X, write=path, check=True, **quiet) == ()  # there is no table
    gpu.cost = lambda c: 50 if c["BLOCK_M"] == 8 else 100
    (found,) = tune.tune(f, X, write=path, **quiet)
    assert found.config["BLOCK_M"] == 8
    gpu.raced.clear()
    gpu.cost = lambda c: 101.9 if c["BLOCK_M"] == 8 else 100
    (kept,) = tune.tune(f, X, write=path, check=True, **quiet)
    assert (kept.said, kept.config, len(gpu.raced[0])) == ("tuned", found.config, 2)
    assert [e.seconds for e in loaded(path).entries.values()] == pytest.approx([101.9e-6])
    gpu.cost = lambda c: 102.1 if c["BLOCK_M"] == 8 else 100
    (gone,) = tune.tune(f, X, write=path, check=True, **quiet)
    assert gone.said == "heuristic"
    assert not loaded(path).entries


def test_a_config_that_computes_something_else_is_dropped(gpu):
    gpu.cost = lambda c: {8: 10, 32: 50}.get(c["BLOCK_M"], 100)
    gpu.wrong = lambda c: c["BLOCK_M"] == 8
    (result,) = tune.tune(f, X, progress=lambda _: None)
    assert (result.said, result.config["BLOCK_M"], result.seconds) == ("tuned", 32, pytest.approx(50e-6))
    assert result.dropped
    assert all("BLOCK_M=8" in c for c in result.dropped)
    assert "DROPPED, computes something else: Config(" in str(result)


def test_configs_that_do_not_compile_are_left_out(gpu):
    gpu.cost = lambda c: {8: 10, 32: 20}.get(c["BLOCK_M"], 100)
    gpu.fails = lambda c: c["BLOCK_M"] in (8, 32)
    (result,) = tune.tune(f, X, progress=lambda _: None)
    assert result.said == "heuristic"

    def refused(c):
        if c["BLOCK_M"] in (8, 32):
            raise ValueError("a launcher has no such blocks")

    gpu.fails = refused
    assert tune.tune(f, X, progress=lambda _: None)[0].said == "heuristic"
    gpu.fails = lambda c: True
    with pytest.raises(KernelCompileError, match="it does not fit"):
        tune.tune(f, X, progress=lambda _: None)


def test_equal_programs_are_timed_once(gpu):
    """In the interpreter warps and stages make no difference; on a GPU some blocks make none."""
    tune.tune(f, X, progress=lambda _: None)
    assert len(gpu.raced[0]) > 4
    assert all("num_warps=4" in name and "num_stages" not in name for name in gpu.raced[0][:1])
    blocks = [name.split("num_")[0] for name in gpu.raced[0]]
    assert len(set(blocks)) == len(blocks)


def test_quick_stages_are_called_several_times_on_several_data(gpu, monkeypatch):
    """Every call's results are there and right, in whatever order they are asked for; the data are no two times the same."""
    monkeypatch.setattr(timing, "CHAIN", 3)
    monkeypatch.setattr(timing, "ROUND_SECONDS", 1e9)
    monkeypatch.setattr(timing, "COLD", 2 * X.nbytes)
    (task,) = tune._tasks(f, (X,), "cuda")
    trial = prepared(task)
    assert (trial.calls, len(trial.sets)) == (3, 2)
    outs, _ = trial.programs[task.choice.heuristic][0]()
    assert len(outs) == 3
    for i, (out,) in enumerate(outs):
        x, y = trial.sets[i % 2]
        assert (out == x + y).all()
    assert (trial.sets[0][0] != trial.sets[1][0]).any()
    monkeypatch.setattr(timing, "RESULTS", 2 * X.nbytes)
    trial = prepared(task)
    assert trial.calls == 2


def test_lengths_are_full_while_timing(gpu):
    """An integer per batch element is a length: what it would leave out would not be timed."""
    q, n = jax.ShapeDtypeStruct((2, 8, 1, 16), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    g = lambda q, n, ids: jtops.flash_attention(q, q, q, kv_lengths=n, segment_ids=ids, causal=True)
    (task,) = tune._tasks(g, (q, n, ids), "cuda")
    trial = tune._Trial(task, GPU)
    *_, q_ids, kv_ids, lengths, index = trial.sets[0]
    assert (lengths == jnp.iinfo(jnp.int32).max).all()
    assert not any(x.any() for x in (q_ids, kv_ids, index))
    trial = prepared(task)
    (out, _) = trial.run(task.choice.heuristic)
    q, k, v = (x.reshape(x.shape[-4:]) for x in trial.sets[0][:3])
    assert jnp.allclose(out, jtops.flash_attention(q, k, v, causal=True, implementation="xla"), atol=1e-5)


def test_explicit_configs_and_a_spent_budget(gpu, tmp_path):
    g = lambda x: f(jtops.softmax(x, config=Config(BLOCK_M=1, BLOCK_N=64, PROGRAMS=4)))
    results = tune.tune(g, X, budget=0, progress=lambda _: None)
    assert sorted(r.said for r in results) == ["explicit", "no time"]
    both = lambda x: g(x) + jtops.softmax(x)  # one problem, of which one call says what it wants
    assert [r.said for r in tune.tune(both, X, budget=0, progress=lambda _: None)] == ["no time", "no time"]
    assert not (tmp_path / "tuning" / TABLE).exists()


def both(x):
    return jtops.softmax(f(x))


def test_a_budget_is_kept(gpu, monkeypatch):
    """What takes longer to build than there is time for is not waited for, what is measured counts, and nothing more is begun."""
    monkeypatch.setattr(tune, "_AT_ONCE", 1)
    gpu.cost, done = lambda c: 50 if c["BLOCK_M"] == 8 else 100, threading.Event()
    gpu.fails = lambda c: c["BLOCK_M"] == 32 and done.wait(60)
    results = tune.tune(both, X, budget=4, progress=lambda _: None)
    done.set()
    assert [(r.problem.op, r.said) for r in results] == [("add", "tuned"), ("softmax", "no time")]
    assert results[0].config["BLOCK_M"] == 8


def test_one_failure_does_not_keep_others_from_being_tuned(gpu, tmp_path):
    gpu.cost, said = lambda c: 50 if c["BLOCK_M"] == 8 else 100, []
    gpu.fails = lambda c: "PROGRAMS" in c.blocks
    with pytest.raises(KernelCompileError, match="it does not fit"):
        tune.tune(both, X, progress=said.append)
    assert sorted(word for line in said for word in line.split() if word in ("tuned", "failed")) == ["failed", "tuned"]
    assert [p.op for p in loaded(tmp_path / "tuning" / TABLE).entries] == ["add"]


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, KeyError, RecursionError, MemoryError])
def test_whatever_a_candidate_raises_the_others_are_tuned(gpu, error):
    def raises(c):
        if c["BLOCK_M"] == 32:
            raise error("by a compiler")

    gpu.fails = raises
    gpu.cost = lambda c: 50 if c["BLOCK_M"] == 8 else 100
    assert [(r.said, r.config["BLOCK_M"]) for r in tune.tune(f, X, progress=lambda _: None)] == [("tuned", 8)]


def test_a_disk_that_is_full_for_a_while(gpu, monkeypatch, tmp_path):
    """What is found then is not written, the next is."""
    real, full = tuning_table.update, [OSError(28, "No space left on device")]

    def update(*args):
        if full:
            raise full.pop()
        real(*args)

    monkeypatch.setattr(tuning_table, "update", update)
    monkeypatch.setattr(tune, "_AT_ONCE", 1)
    gpu.cost, said = lambda c: 50 if c["BLOCK_M"] == 8 else 100, []
    with pytest.raises(OSError, match="No space left"):
        tune.tune(both, X, progress=said.append)
    assert len(said) == 2
    assert "No space left" in said[0]
    assert len(loaded(tmp_path / "tuning" / TABLE).entries) == 1


def test_where_it_writes(gpu, tmp_path):
    gpu.cost = lambda c: 50 if c["BLOCK_M"] == 8 else 100
    mine = tmp_path / "a" / "mine.json"
    for write, path in (("shipped", tmp_path / "shipped" / "NVIDIA_H200.json"), (mine, mine)):
        tune.tune(f, X, write=write, progress=lambda _: None)
        assert len(loaded(path).entries) == 1
    assert tuned_now().source == "tuned table (shipped)"
    with pytest.raises(JtopsError, match="tune: /proc/a cannot be written"):
        tune.tune(f, X, write="/proc/a/b.json")
    (tmp_path / "notes.txt").write_text("of mine")
    with pytest.raises(JtopsError, match=r"notes\.txt is there and is no table"):
        tune.tune(f, X, write=tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "of mine"


# ------------------------------------------------------------------------------------------------------------ command line


def test_without_a_gpu():
    with pytest.raises(UnsupportedError, match=r"needs the GPU it tunes for; JAX computes on cpu here"):
        tune.tune(f, X)
    with pytest.raises(UnsupportedError, match=r"dry run under jtops\.config\.target"):
        tune.tune(f, X, dry_run=True)
    with pytest.raises(SystemExit, match="needs the GPU"):
        tune.main(["softmax"])


def test_another_gpu_than_the_one_that_is_there(gpu):
    with jtops.config.target("sm_80"), pytest.raises(UnsupportedError, match=r"this process' NVIDIA H200.*asks for sm_80"):
        tune.tune(f, X)


def test_command(capsys):
    with jtops.config.target("sm_90"):
        tune.main(["rms_norm", "--shape", "512x384", "16x8x384,384", "--dtype", "float16", "float32", "--dry-run"])
        told = capsys.readouterr().out
        assert told.count("rms_norm fwd float16,-,float16,-,-,-,-,- n=384 CENTRED=False UNIT=1 r=512") == 1
        assert told.count("rms_norm vjp float32") == 2
        tune.main(["add", "softmax", "--case", "row", "8192x4096", "--forward", "--dry-run"])
        assert "vjp" not in capsys.readouterr().out


def test_one_op_that_cannot_be_traced_does_not_keep_others_from_being_tuned(capsys, monkeypatch):
    real = tune.program

    def program(spec, *rest):
        if spec.name == "add":
            raise ZeroDivisionError("in add")
        return real(spec, *rest)

    monkeypatch.setattr(tune, "program", program)
    with jtops.config.target("sm_90"), pytest.raises(SystemExit, match=r"choices could not be measured.*because: in add"):
        tune.main(["add", "logsumexp", "--forward", "--dry-run"])
    told = capsys.readouterr().out
    assert "failed: add " in told
    assert "logsumexp out bfloat16" in told


HANGING = """
import threading, types
from jtops import tune
def main():
    pool = tune.concurrent.futures.ThreadPoolExecutor(1, tune._THREADS)
    pool.submit(threading.Event().wait)
    pool.shutdown(wait=False)
    tune.sys.exit("said at the end")
tune.main = main
tune._to_the_end()
"""


def test_the_command_ends_though_a_build_does_not():
    ran = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (1, "said at the end")


def test_the_most_valuable_first(capsys):
    """The first dtype; of all ops first the sizes of models, and of these each op's first. A later call goes on in that order."""
    asked = ["all", "--forward", "--dry-run", "--dtype", "bfloat16", "float32"]
    with jtops.config.target("sm_90"):
        tune.main(asked)
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if " s " in line]
        tune.main([*asked, "--first", "4"])
        assert f"\n\n{len(lines) - 3} choices" in capsys.readouterr().out
    ops = [line[4] for line in lines]
    assert ops[:5] == ["add_rms_norm", "flash_attention", "matmul", "rms_norm", "softmax"]
    assert ops[5:7] == ops[:2]
    dtypes = [line[6].split(",")[0] for line in lines]
    assert dtypes == sorted(dtypes)
    assert [line[0] for line in lines] == [str(i + 1) for i in range(len(lines))]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sofmax"], "no op 'sofmax'; there are add, "),
        (["softmax", "--case", "none"], "no such case: softmax has "),
        (["matmul", "--case", "mlp", "--shape", "64x64"], "matmul: give the shape of b too"),
        (["add", "--shape", "-"], "add has operands x, y; got the shapes -"),
        (["add", "--shape", "4x4", "--write", "shipped"], "add a case"),
    ],
)
def test_command_errors(argv, said):
    with jtops.config.target("sm_90"), pytest.raises(SystemExit, match=said):
        tune.main([*argv, "--dry-run"])


# -------------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_tune_on_the_gpu(tmp_path):
    """From a heuristic that is made bad: the entry is found, written, read and faster."""
    x = jax.ShapeDtypeStruct((2048, 1000), jnp.bfloat16)
    path = tmp_path / "table.json"
    (result,) = tune.tune(jtops.softmax, x, budget=5, write=path, progress=print)
    assert result.said in ("tuned", "heuristic")
    assert 0 < result.seconds <= result.heuristic_seconds < 1e-3
    assert result.dropped == ()
    assert len(loaded(path).entries if path.exists() else ()) == (result.said == "tuned")  # a race may go either way
    slow = Config(BLOCK_M=1, BLOCK_N=64, PROGRAMS=16, num_warps=1)
    device = target.present()
    (task,) = tune._tasks(jtops.softmax, (x,), "cuda")
    tuning_table.update(tuned.user_directory() / tuned.file_name(device.device_kind), device.device_kind, str(task.choice.target),
                [tuning_table.Entry(result.problem, slow.kwargs, task.choice.fingerprint, 1.0, 2.0)])  # fmt: skip
    (launch,) = jtops.explain(jtops.softmax, x)
    assert (launch.config, launch.options["num_warps"]) == ("tuned table (user)", 1)
    trial = prepared(task, device)
    assert trial.build(slow) is None
    assert trial.agrees(slow)
    seconds = trial.race([slow, task.choice.heuristic])
    assert seconds[slow] > 1.1 * seconds[task.choice.heuristic]  # other tests use the GPU meanwhile
