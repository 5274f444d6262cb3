"""Kernels compiled for GPUs that are not there: what they take, how many there are, and that the text is the same everywhere.

``python -m tests.kernels.test_lowering`` writes the snapshot of registers, spills and shared memory anew; given ops, theirs.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import triton

import jtops
from jtops.core.target import Target
from jtops.kernels._lib.spec import floating
from tests.kernels import lowered, resources
from tests.specs import SPECS, cotangent, function, those, with_gradients

SNAPSHOT = Path(__file__).parent / "resources.json"
TARGETS = {"sm_80": "cuda", "sm_90": "cuda", "sm_100": "cuda", "gfx942": "rocm"}
CASES = [(spec, case) for spec in SPECS.values() for case in spec.compiled]


def measured(spec, case, dtype, target):
    """What the kernels of one case take, by name."""
    found = lowered.kernels(with_gradients(function(spec, case)), *case.types(dtype), target=target, platform=TARGETS[target])
    key = lambda i, k: f"{spec.name}/{case.id}/{dtype}/{target}/{k.name}{'' if i == 0 else f'.{i + 1}'}"
    times = [sum(earlier.name == k.name for earlier in found[:i]) for i, k in enumerate(found)]
    return {key(i, k): (k, resources.of(k)) for i, k in zip(times, found, strict=True)}


def compilations():
    """In bfloat16 every case for the GPU we measure on, one of each op for the others; the rest where time is no matter."""
    for (spec, case), target, dtype in itertools.product(CASES, TARGETS, ("bfloat16", "float32")):
        first = case is spec.compiled[0] and not spec.alike
        at_once = dtype == "bfloat16" and (target == "sm_90" or first)
        name = f"{spec.name}-{case.id}-{target}-{dtype}"
        yield pytest.param(spec, case, target, dtype, id=name, marks=() if at_once else pytest.mark.slow)


@pytest.mark.parametrize(("spec", "case", "target", "dtype"), list(compilations()))
def test_resources(spec, case, target, dtype):
    """Every kernel compiles for every GPU, fits its shared memory, and spills no more than it did."""
    snapshot = json.loads(SNAPSHOT.read_text())
    got = measured(spec, case, dtype, target)
    for name, (kernel, taken) in got.items():
        assert taken["shared_bytes"] <= Target.parse(target).max_shared_bytes, name
        assert str(kernel.target) == target
        # Rows times their length may pass 2**31, so some product is 64 bits wide.
        if "ttir" in kernel.triton_kernel.asm:  # Gluon's load by descriptors, which hardware makes addresses of
            assert re.search(r"arith\.muli .*i64", kernel.triton_kernel.asm["ttir"]), f"{name} computes no address in 64 bits"
        assert name in snapshot, f"{name} is not in the snapshot; write it with python -m tests.kernels.test_lowering"
        if triton.__version__ == snapshot["triton"]:  # other compilers allocate registers differently
            assert taken["spill_bytes"] <= snapshot[name]["spill_bytes"], (name, taken, snapshot[name])


@pytest.mark.parametrize(("spec", "case"), those("small"))
def test_number_of_launches(spec, case):
    """One launch forward, and what the SPEC says for a gradient."""
    f, operands = function(spec, case), case.types("float32")
    name = spec.launches or spec.name
    assert lowered.launches(f, *operands) == {f"jtops_{name}_out": 1}
    loss = lambda *a: (f(*a) * cotangent(jax.eval_shape(f, *operands).shape)).sum()
    got = lowered.launches(jax.value_and_grad(loss, floating(operands)), *operands)
    assert got.pop(f"jtops_{name}_fwd") == 1
    assert all(launch.startswith(f"jtops_{name}_vjp") for launch in got), got
    assert got.total() == (case.backward_kernels or spec.backward_kernels), got
    batched = [jax.ShapeDtypeStruct((5, *x.shape), x.dtype) for x in operands]
    assert lowered.launches(jax.vmap(f), *batched) == {f"jtops_{name}_out": 1}


def test_plain_forward_writes_no_residuals():
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    results = lambda f: re.search(r"custom_call.*-> (.*)\n", lowered.text(f, x))[1]
    assert results(jtops.layer_norm) == "tensor<4x8xf32>"
    assert results(jax.value_and_grad(lambda x: jtops.layer_norm(x).sum())) == "(tensor<4x8xf32>, tensor<4xf32>, tensor<4xf32>)"


def test_layouts_are_pinned():
    """Case 22: whatever the producer, the kernel sees row-major operands and writes row-major results."""
    text = lowered.text(lambda x: jtops.softmax(x.T), jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert "operand_layouts = [dense<[1, 0]>" in text
    assert "result_layouts = [dense<[1, 0]>" in text


SCRIPT = """
import sys; sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, jtops
assert jtops.__file__.startswith(sys.argv[1]), jtops.__file__
def f(x, w):
    y = jtops.softmax(jtops.add(jtops.layer_norm(x, w, w), x))
    return (y * y).sum()
x, w = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.float32)
with jtops.config.target(sys.argv[2]):
    sys.stdout.write(jax.jit(jax.grad(f, (0, 1))).trace(x, w).lower(lowering_platforms=("cuda",)).as_text())
"""


def test_same_text_in_every_process(tmp_path):
    """Two processes with their own hash seeds, kernel caches and install paths lower one program to the same bytes."""
    texts = []
    for i in (1, 2):
        home = tmp_path / f"install{i}"
        shutil.copytree(Path(jtops.__file__).parent, home / "jtops", ignore=shutil.ignore_patterns("__pycache__"))
        env = os.environ | {"PYTHONHASHSEED": str(i), "TRITON_CACHE_DIR": str(tmp_path / f"cache{i}"), "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(home), "sm_90"], capture_output=True, text=True, env=env, check=False
        )
        assert run.returncode == 0, run.stderr[-2000:]
        texts.append(run.stdout)
    assert texts[0] == texts[1]
    assert len(re.findall(lowered.CALL, texts[0])) >= 5
    assert str(tmp_path) not in texts[0]


def write_snapshot(names):
    """Compile these ops, or all, and write what they take."""
    taken = {k: v for k, v in json.loads(SNAPSHOT.read_text()).items() if names and k.split("/")[0] not in names}
    for spec, case in CASES:
        if names and spec.name not in names:
            continue
        for target in TARGETS:
            for dtype in ("bfloat16", "float32"):
                taken |= {name: r for name, (_, r) in measured(spec, case, dtype, target).items()}
                print(f"\r{len(taken)} kernels", end="", flush=True)
    taken["triton"] = triton.__version__
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(taken.items()))
    SNAPSHOT.write_text(f"{{\n{lines}\n}}\n")
    print(f", written to {SNAPSHOT}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.test_lowering", description=write_snapshot.__doc__)
    parser.add_argument("op", nargs="*", choices=[[], *SPECS], help="all if none is named", metavar="op")
    os.environ["JAX_PLATFORMS"] = "cpu"
    write_snapshot(parser.parse_args().op)
