"""Train a language model of about 100 M parameters by Triton kernels and by XLA, and compare: ``python -m benchmarks.training``.

Both have the same seed, and the same data in the same order. It writes tokens per second, both validation curves and a picture
under benchmarks/results.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import machine

ROOT = Path(__file__).parent.parent
SIZES = {"layers": 14, "width": 768, "heads": 12, "length": 1024, "batch": 32, "steps": 200, "learning-rate": 6e-4}


def train(implementation: str, folder: Path) -> dict:
    """Run the example once; return its figures."""
    figures = folder / f"{implementation}.json"
    command = [
        sys.executable,
        "examples/train_lm.py",
        "--implementation",
        implementation,
        "--dtype",
        "bfloat16",
        "--json",
        str(figures),
    ]
    command += [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--picture", str(folder / "curve.png")], cwd=ROOT, env=env, check=False)
    return json.loads(figures.read_text())


def picture(path: Path, runs: dict[str, dict]) -> None:
    fig = Figure(figsize=(7, 4), layout="constrained")
    ax = fig.subplots()
    for (name, run), style in zip(runs.items(), ("o-", "x--"), strict=True):
        ax.plot(*zip(*run["curve"], strict=True), style, label=f"{name}, {run['tokens_per_second']:,.0f} tokens/s")
    ax.set(
        xlabel="step", ylabel="validation, bits per byte", title=f"{runs['triton']['parameters'] / 1e6:.0f} M parameters, bfloat16"
    )
    ax.legend()
    fig.savefig(path, dpi=120)


def main() -> int:
    machine.need_gpu()
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: train(name, Path(folder)) for name in ("triton", "xla")}
    about = machine.describe()
    path = machine.record_path("training", about)
    finals = {name: run["curve"][-1][1] for name, run in runs.items()}
    speed = {name: run["tokens_per_second"] for name, run in runs.items()}
    apart = abs(finals["triton"] - finals["xla"])
    record = {**about, "sizes": SIZES, "apart_bits_per_byte": apart, "faster": speed["triton"] / speed["xla"], "runs": runs}
    path.write_text(json.dumps(record, indent=1) + "\n")
    picture(path.with_suffix(".png"), runs)
    for name in runs:
        print(f"{name:8}{speed[name]:12,.0f} tokens/s {finals[name]:8.4f} bits per byte")
    print(f"Triton is {record['faster']:.2f}x as fast; the validation losses are {apart:.4f} bits per byte apart. {path.name}")
    return int(apart > 0.02)


if __name__ == "__main__":
    raise SystemExit(main())
