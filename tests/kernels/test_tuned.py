"""Tables of tuned configs: which one is asked, what is taken from it, what damage does."""

import functools
import itertools
import json
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jtops
from jtops import tune
from jtops._compat import triton as triton_compat
from jtops.core import cache, target
from jtops.core.compile.content import content as kernels_content
from jtops.core.tuning import table as tuning_table
from jtops.errors import JtopsError
from jtops.kernels._lib.frame import tuned
from tests.kernels import lowered
from tests.specs import SPECS

X = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


@pytest.fixture(autouse=True)
def own_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("JTOPS_TUNING_DIR", str(tmp_path / "tuning"))
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    cache.clear()


def loaded(path):
    return tuning_table.parsed(path, path.read_text())


def tasks(f, *args, on="sm_90"):
    with jtops.config.target(on):
        return tune._tasks(f, args, target.Target.parse(on).platform)


def now(f=jtops.softmax, *args):
    """What the only choice in a call is settled to: config and source."""
    (task,) = tasks(f, *(args or (X,)))
    return task.now


def entry(f=jtops.softmax, *args, **changes) -> tuning_table.Entry:
    (task,) = tasks(f, *(args or (X,)))
    config = task.choice.heuristic.kwargs | changes
    return tuning_table.Entry(task.choice.problem, config, task.choice.fingerprint, 1e-6, 2e-6)


def store(directory, *entries, device=H200, dropped=()):
    path = directory / tuned.file_name(device)
    tuning_table.update(path, device, "sm_90", entries, dropped)
    return path


def test_order():
    """Explicit, the user's table, the shipped one, the heuristic."""
    assert now().source == "heuristic"
    store(tuned.SHIPPED, entry(num_warps=16))
    assert (now()["num_warps"], now().source) == (16, "tuned table (shipped)")
    path = store(tuned.user_directory(), entry(num_warps=2))
    assert (now()["num_warps"], now().source) == (2, "tuned table (user)")
    explicit = jtops.Config(BLOCK_M=2, BLOCK_N=4096, PROGRAMS=128)
    assert (got := now(functools.partial(jtops.softmax, config=explicit))) == explicit
    assert got.source == "explicit"
    store(tuned.user_directory(), dropped=[entry().problem])  # read anew: the file has changed
    assert now().source == "tuned table (shipped)"
    path.unlink()
    assert now().source == "tuned table (shipped)"


def test_whatever_the_policy_of_timing():
    store(tuned.SHIPPED, entry(num_warps=16))
    with jtops.config.tuning("never"):
        assert now()["num_warps"] == 16


def test_the_interpreter_has_no_device():
    x = jnp.ones((4, 8), jnp.bfloat16)
    store(tuned.SHIPPED, entry(jtops.softmax, x, num_warps=16))
    with tuned.choices() as found:
        jtops.softmax(x, implementation="interpret")
    assert [config.source for _, config in found] == ["heuristic"]


def test_order_of_devices():
    """A table of the very device first, the user's before shipped ones; of others of its architecture by name."""
    for warps, (directory, device) in enumerate(itertools.product((tuned.SHIPPED, tuned.user_directory()), (H200, H100))):
        store(directory, entry(num_warps=2**warps), device=device)
    store(tuned.SHIPPED, entry(num_warps=32), device="NVIDIA A100")
    path = tuned.SHIPPED / tuned.file_name("NVIDIA A100")
    path.write_text(path.read_text().replace("sm_90", "sm_80"))
    kinds = lambda device: [(source, t.device) for source, t in tuned.tables("sm_90", device)]
    assert kinds(H200) == [("user", H200), ("shipped", H200), ("user", H100), ("shipped", H100)]
    assert kinds(None) == [("user", H100), ("user", H200), ("shipped", H100), ("shipped", H200)]
    assert now()["num_warps"] == 8
    assert tasks(jtops.softmax, X, on="sm_80")[0].now["num_warps"] == 32
    assert tasks(jtops.softmax, X, on="sm_100")[0].now.source == "heuristic"


def test_a_bucket_shares_an_entry():
    store(tuned.SHIPPED, entry(num_warps=16))
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    for same in (shape(5000, 4096), shape(8192, 4096), shape(2, 4001, 4096)):
        assert now(jtops.softmax, same)["num_warps"] == 16, same
    others = (
        shape(4096, 4096),
        shape(8192, 2048),
        shape(8192, 4095),
        shape(8192, 4088),
        jax.ShapeDtypeStruct((8192, 4096), "float32"),
    )
    for other in others:
        assert now(jtops.softmax, other).source == "heuristic", other
    assert now(lambda x: jtops.softmax(x, where=x > 0), X).source == "heuristic"
    assert now(jtops.log_softmax, X).source == "heuristic"


def test_the_frames_own_axes_do_not_matter():
    """Equal problems of a stage that launches the same kernel are one choice, mapped or not."""
    assert now(jax.vmap(jtops.softmax), X) == now()
    (forward, backward) = tasks(jax.grad(lambda x: jtops.softmax(x).sum().astype("float32")), X)
    assert forward.choice.problem == tasks(jtops.softmax, X)[0].choice.problem
    assert (backward.choice.problem.choice, backward.call.stage) == ("vjp", "vjp")


def test_a_changed_kernel_is_ignored_with_one_warning(caplog):
    old = entry(num_warps=16)
    path = store(tuned.SHIPPED, tuning_table.Entry(old.problem, old.config, "0" * 16, 1e-6, 2e-6))
    assert [now().source for _ in range(3)] == ["heuristic"] * 3
    (said,) = caplog.messages
    assert said.startswith(f"{path}: softmax has changed since it was tuned")


def test_where_a_kernel_stands_does_not_change_it(tmp_path, monkeypatch):
    """Nor the file's other contents: only the kernel, its helpers, and the constants that they see."""
    monkeypatch.syspath_prepend(tmp_path)
    text = """
from jtops._compat.triton import tl, triton
SIZE = tl.constexpr({size})

@triton.jit
def helper(x):
    return x + {more}

@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, SIZE), helper(tl.load(x_ptr)))
"""

    def content(name, before="", size=16, more=1):
        (tmp_path / f"{name}.py").write_text(before + text.format(size=size, more=more))
        return kernels_content([__import__(name).kernel])

    first = content("kernels_a")
    assert content("kernels_b", before="# moved\n\n") == first
    assert content("kernels_c", size=32) != first
    assert content("kernels_d", more=2) != first


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format": 7}', '{"format": 1, "entries": [{}]}', "\x00"])
def test_damage(text, caplog):
    """The user's file counts as absent, with one warning; a shipped one is an error."""
    path = store(tuned.user_directory(), entry(num_warps=2))
    store(tuned.SHIPPED, entry(num_warps=16))
    path.write_text(text)
    assert [now().source for _ in range(3)] == ["tuned table (shipped)"] * 3
    assert [m.startswith(f"{path} is ignored") for m in caplog.messages] == [True]
    store(tuned.user_directory(), entry(num_warps=4))
    assert now()["num_warps"] == 4
    (tuned.SHIPPED / path.name).write_text(text)
    with pytest.raises(JtopsError, match=r"NVIDIA_H200\.json is damaged"):
        now()


def test_another_triton(caplog, monkeypatch):
    """What it makes of a config may not fit: the user tunes again. Shipped tables are tested with all of them."""
    for directory in (tuned.user_directory(), tuned.SHIPPED):
        path = store(directory, entry(num_warps=16))
        path.write_text(path.read_text().replace(f'"triton": "{triton_compat.triton.__version__}"', '"triton": "3.1.4"'))
    assert now().source == "tuned table (shipped)"
    assert "it is of Triton 3.1.4" in caplog.text
    path = store(tuned.user_directory(), entry(jtops.log_softmax, X))
    assert len(loaded(path).entries) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"BLOCK_K": 32}, "must have the blocks BLOCK_M, BLOCK_N, PROGRAMS"),
        ({"num_warps": 3}, "num_warps must be a power of two; got 3"),
        ({"BLOCK_M": "4"}, "BLOCK_M must be a power of two; got '4'"),
    ],
)
def test_a_wrong_config_names_its_file(changes, said):
    path = store(tuned.user_directory(), entry(**changes))
    with pytest.raises(JtopsError, match=f"{path}.*softmax out bfloat16.*{said}|{path}.*{said}.*"):
        now()


def test_an_entry_may_name_the_variant_whose_choice_it_is():
    """Each variant has entries of its own, and a call's config that names another one finds none of these."""
    q = jax.ShapeDtypeStruct((4, 4096, 16, 64), jnp.bfloat16)
    attend = lambda **config: lambda q: jtops.flash_attention(q, q, q, **config)
    assert now(attend(), q)["num_stages"] == 2
    store(tuned.SHIPPED, entry(attend(), q, variant="hopper", num_stages=3))
    assert (now(attend(), q)["num_stages"], now(attend(), q).source) == (3, "tuned table (shipped)")
    portable = attend(config=jtops.Config(variant="portable"))
    assert now(portable, q).source == "heuristic"
    store(tuned.SHIPPED, entry(portable, q, variant="portable", num_warps=2))
    assert (now(portable, q)["num_warps"], now(portable, q).source) == (2, "tuned table (shipped)")
    store(tuned.SHIPPED, entry(attend(), q, variant="portable"))
    with pytest.raises(JtopsError, match=r"variant='?portable.* of flash_attention hopper\.out .* kernels of another name"):
        now(attend(), q)


def test_lowering_is_the_same_on_the_gpu_and_elsewhere(monkeypatch):
    """With a shipped table: where the GPU is only named, and where it is there."""
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    store(tuned.SHIPPED, entry(jtops.softmax, x, num_warps=8, BLOCK_M=2))
    store(tuned.SHIPPED, entry(jtops.softmax, x, num_warps=4, BLOCK_M=2), device="NVIDIA H9")  # of another architecture
    path = tuned.SHIPPED / "NVIDIA_H9.json"
    path.write_text(path.read_text().replace("sm_90", "sm_100"))
    fresh = lambda: functools.partial(jtops.softmax)  # JAX remembers what it has lowered
    named = lowered.text(fresh(), x)
    monkeypatch.setattr(target, "gpus", lambda _: [types.SimpleNamespace(compute_capability="9.0", device_kind=H200)])
    there = jax.jit(fresh()).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert there == named
    (tuned.SHIPPED / "NVIDIA_H200.json").unlink()
    assert lowered.text(fresh(), x) != named


def test_lookups_and_writes_at_once():
    """Readers see one of the values at any time, and no writer's entry gets lost."""
    shapes = [jax.ShapeDtypeStruct((2**i, 4096), jnp.bfloat16) for i in range(4, 10)]
    entries = [entry(jtops.softmax, x, num_warps=2) for x in shapes]
    choices = [tasks(jtops.softmax, x)[0].choice for x in shapes]
    store(tuned.user_directory(), entries[0])
    stop, wrong = threading.Event(), []

    def look():
        while not stop.is_set():
            if (got := tuned.lookup(choices[0])) is None or got["num_warps"] not in (2, 4):
                wrong.append(got)

    def write(mine):
        for warps in (4, 2) * 5:
            changed = [tuning_table.Entry(e.problem, {**e.config, "num_warps": warps}, e.kernels, 1e-6, 2e-6) for e in mine]
            store(tuned.user_directory(), *changed)

    readers = [threading.Thread(target=look) for _ in range(4)]
    writers = [threading.Thread(target=write, args=([e],)) for e in entries]
    for thread in readers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    for thread in readers:
        thread.join()
    assert wrong == []
    assert len(loaded(tuned.user_directory() / "NVIDIA_H200.json").entries) == len(entries)
    assert [p.name for p in tuned.user_directory().iterdir()] == ["NVIDIA_H200.json"]


def test_tables_are_readable_and_no_decision_of_autotune(caplog, tmp_path):
    path = store(tuned.user_directory(), entry(num_warps=2), entry(jtops.log_softmax, X))
    lines = path.read_text().splitlines()
    assert len(lines) == 4  # a line per entry
    assert json.loads(lines[2].rstrip(","))["op"] == "softmax"
    assert tuning_table.export_table(tmp_path / "decisions.json") == 0
    assert caplog.messages == []


def test_explain_says_the_source():
    x = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    store(tuned.SHIPPED, entry(jtops.softmax, x, num_warps=8))
    explicit = jtops.Config(BLOCK_M=1, BLOCK_N=256, PROGRAMS=16)

    def f(x):
        return jtops.rms_norm(jtops.log_softmax(jtops.softmax(x), config=explicit))

    with jtops.config.target("sm_90"):
        found = jtops.explain(f, x)
    assert [launch.config for launch in found] == ["tuned table (shipped)", "explicit", "heuristic"]
    assert found[0].options["num_warps"] == 8
    assert "tuned table (shipped)  " in str(found)


# ---------------------------------------------------------------------------------------------------------- shipped tables

SHIPPED = tuned.SHIPPED  # the tests above have another
SHIPPED_TABLES = [loaded(path) for path in sorted(tuned.SHIPPED.glob("*.json"))]


def test_shipped_tables_are_where_the_package_has_them():
    """As its package data say: ``kernels/tuned/*.json``."""
    assert Path(jtops.__file__).parent / "kernels" / "tuned" == SHIPPED


def shipped_tasks(table) -> dict[tuning_table.Problem, tune._Task]:
    """Every choice of the real sizes of the SPECs, of the ops and dtypes that a table has."""
    found = {}
    for op, dtype in {(p.op, p.text.split(",")[0].split()[0]) for p in table.entries}:
        for case in SPECS[op].sizes:
            f, types = tune.program(SPECS[op], case, dtype)
            found |= {task.choice.problem: task for task in tasks(f, *types, on=table.target)}
    return found


def test_shipped_entries_are_of_the_kernels_there_are():
    """Stale ones do nothing but warn: tune the op again, or delete them."""
    for table in SHIPPED_TABLES:
        known = shipped_tasks(table)
        unknown = [str(p) for p in table.entries if p not in known]
        assert not unknown, f"{table.path}: no size of a SPEC has these problems: {unknown}"
        stale = [str(p) for p, e in table.entries.items() if e.kernels != known[p].choice.fingerprint]
        assert not stale, f"{table.path}: tune again, or delete: {stale}"
        for problem, e in table.entries.items():
            assert tuned._config("shipped", table, e, known[problem].choice.heuristic) != known[problem].choice.heuristic, problem
            assert e.seconds <= tune.WORTH * e.heuristic_seconds * 1.01, problem


@pytest.mark.slow
def test_shipped_entries_compile():
    """Those in bfloat16 compile in test_lowering as well."""
    for table in SHIPPED_TABLES:
        known = shipped_tasks(table)
        for problem, e in table.entries.items():
            stage = tune._stage(known[problem].call, "cuda")
            with tuned.forcing(problem, jtops.Config(**e.config)):
                traced = jax.jit(stage).trace(*known[problem].avals)
            traced.lower(lowering_platforms=("cuda",))
