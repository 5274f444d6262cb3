"""What README and CONTRIBUTING show runs as it stands there."""

import doctest
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jtops
from tests.kernels import lowered
from tests.specs import OPS

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Import a piece of text as a module: Triton wants its kernels' source in a file."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return __import__(name)

    return load


@pytest.mark.parametrize("op", OPS, ids=lambda f: f.__name__)
def test_docstring(op):
    """Every public op shows how it is called, with what comes out."""
    names = {"jax": jax, "jnp": jnp, "jtops": jtops}
    (example,) = doctest.DocTestFinder(recurse=False).find(op, op.__name__, globs=names)
    assert any(f"jtops.{op.__name__}(" in e.source for e in example.examples), "an example under >>> is missing"
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


def test_readme(module, capsys):
    readme = module("readme_example", "\n".join(blocks("README.md")))
    assert readme.out.shape == readme.q.shape
    assert readme.dk.dtype == jnp.bfloat16
    assert re.search(lowered.CALL, capsys.readouterr().out)
    assert (readme.centered == 0).all()
    assert readme.exported.platforms == ("cuda",)
    assert "scale_kernel" in readme.exported.mlir_module()


def test_contributing(module):
    (text,) = blocks("CONTRIBUTING.md")
    square = module("square_example", text)
    for case in (square.SPEC.small, square.SPEC.meshed, *square.SPEC.cases):
        x = jnp.full(case.inputs[0].shape, 1.5)
        for implementation in ("interpret", "xla"):
            assert (square.square(x, implementation=implementation) == 2.25).all()
