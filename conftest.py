"""Which tests run where.

``pytest``                 everything a machine without a GPU can show, on CPU with 8 forced devices
``pytest --slow``          the same and what takes long (``make test-all``)
``pytest --gpu``           only the tests marked ``gpu``, on the GPU; with two or more GPUs also those marked ``multigpu``
"""

import os


def pytest_addoption(parser):
    parser.addoption(
        "--gpu", action="store_true", help="run the tests marked gpu (and multigpu, where there are two GPUs), and only them"
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_configure(config):
    # Before anything imports jax.
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Level 0: most of the time goes into compiling programs that run once.
        flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
        os.environ["XLA_FLAGS"] = " ".join([*os.environ.get("XLA_FLAGS", "").split(), *flags])
    for name in [k for k in os.environ if k.startswith("JTOPS_")]:  # a developer's settings must not change what is tested
        del os.environ[name]


def pytest_collection_modifyitems(config, items):
    import jax

    gpu = config.getoption("--gpu")
    gpus = len(jax.local_devices(backend="gpu")) if gpu else 0

    def belongs(item):
        marks = {mark.name for mark in item.iter_markers()}
        if gpu:
            return "gpu" in marks or ("multigpu" in marks and gpus > 1)
        return not marks & {"gpu", "multigpu"} and ("slow" not in marks or config.getoption("--slow"))

    kept = [item for item in items if belongs(item)]
    config.hook.pytest_deselected(items=[item for item in items if not belongs(item)])
    items[:] = kept
