"""The code that README and CONTRIBUTING show runs as it stands there."""

import doctest
import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jtops
from tests import numerics, oracles, specs
from tests.kernels import lowered

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    found = re.findall(r"^ *```python\n(.*?)^ *```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for text in found]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Import a piece of text as a module: Triton wants its kernels' source in a file."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return __import__(name)

    return load


@pytest.mark.parametrize("op", specs.OPS, ids=lambda f: f.__name__)
def test_docstring(op):
    """Every public op shows how it is called, with what comes out."""
    names = {"jax": jax, "jnp": jnp, "jtops": jtops}
    (example,) = doctest.DocTestFinder(recurse=False).find(op, op.__name__, globs=names)
    assert any(f"jtops.{op.__name__}(" in e.source for e in example.examples), "an example under >>> is missing"
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


def checked(readme, said):
    """What the README says of its blocks."""
    if hasattr(readme, "dq"):
        assert readme.out.shape == readme.q.shape
        assert readme.dk.dtype == jnp.bfloat16
    if hasattr(readme, "layer"):
        assert readme.h.shape == readme.x.shape
    if hasattr(readme, "centered"):
        assert (readme.centered == 0).all()
    if hasattr(readme, "exported"):
        assert re.search(lowered.CALL, said)
        assert readme.exported.platforms == ("cuda",)
        assert re.search(lowered.CALL, readme.exported.mlir_module())
    if hasattr(readme, "scale_kernel"):
        with jtops.config.interpret():
            assert (readme.scale(jnp.ones(5000)) == 3).all()
    return bool({"dq", "layer", "centered", "exported", "scale_kernel", "launches"} & set(vars(readme)))


@pytest.mark.parametrize("number", range(len(blocks("README.md"))))
def test_readme(module, capsys, number):
    """Each block by itself: who copies one has all it needs."""
    readme = module(f"readme_example_{number}", blocks("README.md")[number])
    assert checked(readme, capsys.readouterr().out)


def test_contributing(module, monkeypatch):
    """The page alone makes an op: its file, its truth and its cases agree, and its docstring is right."""
    text, truth = blocks("CONTRIBUTING.md")
    square = module("square_example", text)
    for name, f in vars(module("square_truth", truth)).items():
        if name.startswith("square"):
            monkeypatch.setattr(oracles, name, f, raising=False)
    spec = square.SPEC
    for case in (*spec.small, *spec.meshed, *spec.cases):
        operands = specs.draw(spec, case)
        value = specs.truth(spec, case, operands)
        g = specs.cotangent(value.shape)
        wants = (value, *specs.truth_vjp(spec, case, operands, g))
        for implementation in ("interpret", "xla"):
            got, grads = specs.value_and_vjp(specs.function(spec, case, implementation=implementation), operands, g)
            numerics.close((got, *grads), wants, 1e-6)
        if case.axes:
            case.named_axes()
    monkeypatch.setattr(jtops, "square", square.square, raising=False)
    test_docstring(square.square)
