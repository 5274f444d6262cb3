"""Which tests run where.

``pytest``                 everything a machine without a GPU can show, on CPU with 8 forced devices
``pytest --slow``          the same and what takes long (``make test-all``)
``pytest --gpu``           only the tests marked ``gpu``, on the GPU; with two or more GPUs those marked ``multigpu`` as well
``pytest --launch ptx``    with every launch by that path (``jtops.config.launch``)
``pytest --benchmark``     only benchmarks/, on the GPU
"""

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="only the tests marked gpu, and multigpu where there are two GPUs")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--launch", choices=["ffi", "ptx"], help="the launch path of every kernel")
    parser.addoption("--benchmark", action="store_true", help="only the benchmarks")


def pytest_configure(config):
    # Before anything imports jax.
    if (config.getoption("--benchmark") or config.getoption("--gpu")) and not config.option.collectonly:
        from benchmarks import machine

        if (why := machine.lacks_gpu()) is not None:
            pytest.exit(why, returncode=4)
    if config.getoption("--benchmark"):
        config.args[:] = [str(config.rootpath / "benchmarks")]
    elif not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        # At level 0, because most of the time goes into compiling programs that run once.
        flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
        os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
    # Compiled kernels remember the paths of their sources: a cache that other checkouts write to would give theirs.
    os.environ.setdefault("TRITON_CACHE_DIR", str(config.rootpath / ".pytest_cache" / "triton"))
    for name in [k for k in os.environ if k.startswith("JTOPS_")]:  # a developer's settings must not change what is tested
        del os.environ[name]
    os.environ["JTOPS_TUNING_DIR"] = str(config.rootpath / ".pytest_cache" / "tuning")
    if config.getoption("--launch"):
        os.environ["JTOPS_LAUNCH"] = config.getoption("--launch")


def pytest_ignore_collect(collection_path, config):
    root = config.rootpath
    if collection_path == root / "benchmarks":
        return None if config.getoption("--benchmark") else True
    return None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--benchmark"):
        return
    import jax

    listed = (config.rootpath / "tests" / "slow.txt").read_text().splitlines()
    for item in items:
        if item.nodeid in listed:
            item.add_marker("slow")
    gpu = config.getoption("--gpu")
    gpus = len(jax.local_devices(backend="gpu")) if gpu else 0

    def belongs(item):
        marks = {mark.name for mark in item.iter_markers()}
        if gpu:
            return "gpu" in marks or ("multigpu" in marks and gpus > 1)
        return not marks & {"gpu", "multigpu"} and ("slow" not in marks or config.getoption("--slow"))

    config.hook.pytest_deselected(items=[item for item in items if not belongs(item)])
    items[:] = [item for item in items if belongs(item)]


@pytest.fixture
def benchmark_replay(request):
    """Feed pytest-benchmark device times that were measured elsewhere, so that its tables, JSON and comparisons show them."""

    def replay(samples, extra):
        benchmark = request.getfixturevalue("benchmark")
        clock = iter([t for s in samples for t in (0.0, s)])
        benchmark._timer = lambda: next(clock)
        benchmark._disable_gc = False
        benchmark.extra_info.update(extra)
        benchmark.pedantic(lambda: None, rounds=len(samples), iterations=1, warmup_rounds=0)

    return replay


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--benchmark"):
        from benchmarks import test_ops

        if test_ops.rows:
            terminalreporter.write_sep("=", "device time, median of rounds")
            terminalreporter.write_line(test_ops.report())
