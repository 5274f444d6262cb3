"""Case 51: importing and using jtops where there is no GPU, and where there is no Triton."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jtops

PROBE = """
import sys
{before}
import jtops, jax
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing jtops initialised a backend"
assert "flax" not in sys.modules, "importing jtops imported flax"
if "triton" in sys.modules and sys.modules["triton"] is not None:
    from triton.runtime.driver import driver
    assert driver._active is None, "importing jtops touched the GPU driver"
import pkgutil, importlib
for module in pkgutil.walk_packages(jtops.__path__, "jtops."):
    if module.name not in {{"jtops.linen", "jtops.nnx"}}:
        importlib.import_module(module.name)
assert not xla_bridge.backends_are_initialized(), "importing a submodule initialised a backend"
import jax.numpy as jnp
x, w = jnp.ones((2, 8)), jnp.ones((8,))
for f in (lambda x, w: jtops.add(x, w), lambda x, w: jtops.softmax(x * w), jtops.layer_norm):
    assert jax.eval_shape(f, x, w).shape == (2, 8)
    jax.grad(lambda *a: f(*a).sum(), (0, 1))(x, w)
{after}
print("done")
"""


def probe(before="", after="", **env):
    code = PROBE.format(before=before, after=after)
    env = (
        {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
        | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        | env
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.endswith("done\n")


@pytest.mark.spec("importable without GPU")
def test_without_gpu():
    probe()


INTERPRETED = """
import numpy as np
np.testing.assert_allclose(jtops.softmax(x, implementation="interpret"), jax.nn.softmax(x), rtol=1e-6)
"""


LOWERED = """
try:
    with jtops.config.target("sm_90"):
        jax.jit(lambda x: jtops.softmax(x)).trace(x).lower(lowering_platforms=("cuda",))
except jtops.errors.KernelCompileError as error:
    assert {refused} and "TRITON_INTERPRET was set when Triton was imported" in str(error), error
else:
    assert not {refused}
"""


@pytest.mark.parametrize("value", ["0", "1"])
def test_whatever_triton_interpret_says(value):
    """Case 50: the environment switch of Triton neither turns our interpreter on nor breaks it, or says what it breaks."""
    probe(after=INTERPRETED + LOWERED.format(refused=value == "1"), TRITON_INTERPRET=value)


def test_triton_interpret_set_between_two_calls():
    steps = (f"import os; os.environ['TRITON_INTERPRET'] = '{value}'" + INTERPRETED + LOWERED for value in "101")
    probe(after="\n".join(steps).format(refused=False))


WITHOUT_TRITON = """
for use in (lambda: jtops.softmax(x, implementation="interpret"), lambda: jtops.triton_call(x, kernel=None, out_type=x, grid=1)):
    try:
        use()
    except Exception as error:
        assert "this needs Triton, which is not installed" in str(error), error
    else:
        raise AssertionError("no error")
"""


def test_without_triton():
    """References work, and a kernel says what is missing."""
    probe(before="sys.modules['triton'] = None", after=WITHOUT_TRITON)


@pytest.mark.parametrize("name", ["jax", "triton", "gluon"])
def test_compat_says_what_it_offers(name):
    """What the rest of jtops takes of a module of `_compat` is in its ``__all__``, and what is there exists."""
    module = importlib.import_module(f"jtops._compat.{name}")
    taken = set()
    for path in Path(jtops.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        taken |= {a.name for node in imports if node.module == module.__name__ for a in node.names}
        aliases = {a.asname or a.name for node in imports if node.module == "jtops._compat" for a in node.names if a.name == name}
        used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        taken |= {node.attr for node in used if node.value.id in aliases}
    assert taken <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
