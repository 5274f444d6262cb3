"""Train a small byte-level language model on the sources of Python's standard library, with jtops ops and layers inside.

    python examples/train_lm.py                        # CPU: about two minutes on two cores; GPU: the Triton kernels
    python examples/train_lm.py --implementation xla   # the same by plain jax.numpy, to compare
    python examples/train_lm.py --checkpoint out/run   # saved at each validation; run again, it goes on from there

Writes out/train_lm.png and ends with a table and some sampled text; the exit status says whether the model beats a unigram model of
the same text.
"""

import argparse
import collections
import dataclasses
import json
import math
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from matplotlib.figure import Figure
from tqdm import tqdm

import jtops
from jtops import nnx

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Model and batch."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    length: int = 128
    batch: int = 16


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, dtype, rngs: nnx.Rngs):
        width = sizes.width
        self.norm1, self.norm2 = (nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            sizes.heads, width, dtype=dtype, attention_fn=nnx.causal_attention, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = jtops.add(x, self.attention(self.norm1(x)))
        return jtops.add(x, self.down(jax.nn.gelu(self.up(self.norm2(x)))))


class LanguageModel(nnx.Module):
    def __init__(self, sizes: Sizes, dtype, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, sizes.width, dtype=dtype, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (sizes.length, sizes.width)))
        self.blocks = nnx.List([Block(sizes, dtype, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.LayerNorm(sizes.width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(sizes.width, VOCABULARY, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = jtops.add(self.embed(tokens), self.position[...].astype(self.embed.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's modules: every tenth file is for validation, the others for training."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [f for f in files if "site-packages" not in f.parts and "test" not in f.parts]
    join = lambda some: np.frombuffer(b"\n".join(f.read_bytes() for f in some), np.uint8)
    return join([f for i, f in enumerate(files) if i % 10]), join(files[::10])


def unigram_bits(train: np.ndarray, valid: np.ndarray) -> float:
    """Bits per byte of the validation text under byte frequencies of the training text, each counted once more."""
    counts = np.bincount(train, minlength=VOCABULARY) + 1.0
    return float(-np.log2(counts / counts.sum())[valid].mean())


def loss_of(model, tokens):
    """Mean negative log likelihood of each next byte, in nats."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].astype(jnp.int32)).mean()


@nnx.jit
def train_step(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def valid_step(model, tokens):
    return loss_of(model, tokens)


def draw(seed, text: np.ndarray, sizes: Sizes) -> np.ndarray:
    """A batch of windows of the text: the same for the same seed, wherever a run was interrupted."""
    starts = np.random.default_rng(seed).integers(0, len(text) - sizes.length - 1, sizes.batch)
    return text[starts[:, None] + np.arange(sizes.length + 1)]


def validate(model, text: np.ndarray, sizes: Sizes, batches: int = 16) -> float:
    """Bits per byte over the same windows every time."""
    return float(np.mean([valid_step(model, draw((0, i), text, sizes)) for i in range(batches)])) / math.log(2)


def kernel_check(model, window: np.ndarray, gpu: bool) -> tuple[float, float]:
    """Bits per byte of one window by the kernels (without a GPU: interpreted) and by plain jax.numpy."""
    bits = []
    for implementation in ("triton" if gpu else "interpret", "xla"):
        with jtops.config.implementation(implementation):
            bits.append(float(valid_step(model, window[:1])) / math.log(2))
    return bits[0], bits[1]


@nnx.jit
def next_byte(model, tokens, end, key):
    """A byte drawn after position `end` of the tokens [1, length]."""
    return jax.random.categorical(key, model(tokens)[0, end] / 0.7)


def sample(model, sizes: Sizes, prompt: bytes, count: int) -> str:
    """The prompt and `count` sampled bytes after it."""
    text = list(prompt)
    for i in range(count):
        window = text[-sizes.length :]
        tokens = np.zeros((1, sizes.length), np.uint8)
        tokens[0, : len(window)] = window
        text.append(int(next_byte(model, tokens, len(window) - 1, jax.random.key(i))))
    return bytes(text).decode("utf-8", "replace")


def picture(path: Path, losses: list[float], valid: list[tuple[int, float]], unigram: float) -> None:
    fig = Figure(figsize=(7, 4), layout="constrained")
    ax = fig.subplots()
    ax.plot(np.arange(1, len(losses) + 1), losses, color="0.75", linewidth=1, label="training batch")
    ax.plot(*zip(*valid, strict=True), "o-", color="C0", label="validation")
    ax.axhline(unigram, color="C3", linestyle="--", label=f"unigram model, {unigram:.2f}")
    ax.set(xlabel="step", ylabel="bits per byte", title="Byte-level language model on Python's standard library")
    ax.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)


class Checkpoints:
    """The state of model and optimizer and the curves so far, saved by orbax; nothing without a folder."""

    def __init__(self, folder: Path | None):
        self.manager = (
            ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=1)) if folder else None
        )

    def save(self, step: int, state, curves: dict) -> None:
        if self.manager:
            self.manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), curves=ocp.args.JsonSave(curves)))

    def restore(self, state):
        """-> (step, state, curves) of the last save, or None."""
        step = self.manager.latest_step() if self.manager else None
        if step is None:
            return None
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        saved = self.manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like), curves=ocp.args.JsonRestore())
        )
        return step, saved["state"], saved["curves"]

    def close(self) -> None:
        if self.manager:
            self.manager.wait_until_finished()
            self.manager.close()


def arguments(gpu: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000 if gpu else 600)
    parser.add_argument("--implementation", choices=["triton", "xla", "interpret"], help="default: Triton on a GPU, XLA elsewhere")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if gpu else "float32", help="of activations")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="folder to save in, and to go on from if something is saved there")
    parser.add_argument("--picture", type=Path, default=Path("out/train_lm.png"))
    parser.add_argument("--json", type=Path, help="file for the final figures")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return parser.parse_args()


def main() -> int:
    gpu = jax.default_backend() == "gpu"
    args = arguments(gpu)
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)})
    if args.implementation:
        jax.config.update("jtops_implementation", args.implementation)

    train, valid = corpus()
    unigram = unigram_bits(train, valid)
    model = LanguageModel(sizes, jnp.dtype(args.dtype), nnx.Rngs(args.seed))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, min(100, args.steps // 4), args.steps, 0.1 * args.learning_rate
    )
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)), wrt=nnx.Param)
    parameters = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    implementation = args.implementation or ("triton" if gpu else "xla")
    where = f"{jax.devices()[0].device_kind}, {implementation}, {args.dtype}"
    print(f"{len(train) / 1e6:.1f} MB of Python to learn from, {parameters / 1e6:.2f} M parameters, on {where}")

    checkpoints = Checkpoints(args.checkpoint)
    start, losses, curve = 0, [], []
    if saved := checkpoints.restore(nnx.state((model, optimizer))):
        start, state, curves = saved
        nnx.update((model, optimizer), state)
        losses, curve = curves["losses"], [tuple(point) for point in curves["curve"]]
        print(f"going on from step {start} of {args.checkpoint}")
    if not curve:
        curve.append((0, validate(model, valid, sizes)))
    seconds, timed, mark = 0.0, 0, collections.deque([time.perf_counter()], maxlen=1)
    every = max(1, args.steps // 8)
    with tqdm(total=args.steps, initial=start, unit="step", dynamic_ncols=True) as bar:
        for step in range(start + 1, args.steps + 1):
            losses.append(train_step(model, optimizer, draw((args.seed, step), train, sizes)))
            if step == start + 1:  # compiled; from here on it is training
                jax.block_until_ready(losses[-1])
                mark.append(time.perf_counter())
            else:
                timed += 1
            if step - start > 10:  # a few steps may be under way, so that the bar shows what is done
                jax.block_until_ready(losses[-10])
            if step % every == 0 or step == args.steps:
                losses = [float(x) for x in losses]
                seconds += time.perf_counter() - mark[0]
                curve.append((step, validate(model, valid, sizes)))
                checkpoints.save(step, nnx.state((model, optimizer)), {"losses": losses, "curve": curve})
                bar.set_postfix_str(f"validation {curve[-1][1]:.3f} bits per byte")
                mark.append(time.perf_counter())
            bar.update()
    checkpoints.close()

    final = curve[-1][1]
    picture(args.picture, [x / math.log(2) for x in losses], curve, unigram)
    speed = timed * sizes.batch * sizes.length / max(seconds, 1e-9)
    by_kernels, plain = kernel_check(model, draw((0, 0), valid, sizes), gpu)
    print(f"\n{'unigram model':24}{unigram:8.3f} bits per byte")
    print(f"{'before training':24}{curve[0][1]:8.3f} bits per byte")
    print(f"{'after training':24}{final:8.3f} bits per byte")
    print(f"{'one window':24}{by_kernels:8.3f} by {'the kernels' if gpu else 'interpreted kernels'}, {plain:.3f} by jax.numpy")
    print(f"{'speed':24}{speed:8,.0f} tokens per second")
    print(f"{'picture':24}{args.picture}")
    print("\n" + sample(model, sizes, b"def main(", 200))
    if args.json:
        figures = {"implementation": implementation, "dtype": args.dtype, "parameters": parameters, "steps": args.steps}
        figures |= dataclasses.asdict(sizes) | {"learning_rate": args.learning_rate, "seed": args.seed}
        figures |= {"unigram": unigram, "curve": curve, "tokens_per_second": speed}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if not final < unigram:
        print("The model does not beat the unigram model.")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
