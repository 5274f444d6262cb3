"""What README and CONTRIBUTING show runs as it stands there."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from tests.kernels import lowered

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
