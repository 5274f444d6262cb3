"""Train a small byte-level language model on the sources of Python's standard library, with jtops ops inside.

    python examples/train_lm.py                        # CPU: about two minutes on two cores; GPU: the Triton kernels
    python examples/train_lm.py --implementation xla   # the same by plain jax.numpy, to compare

Writes out/train_lm.png and ends with a table; the exit status says whether the model beats a unigram model of the same text.
"""

import argparse
import collections
import dataclasses
import math
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import jtops

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Model and batch."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    length: int = 128
    batch: int = 16


class LayerNorm(nnx.Module):
    def __init__(self, width: int):
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))

    def __call__(self, x):
        return jtops.layer_norm(x, self.scale[...], self.bias[...])


class Attention(nnx.Module):
    def __init__(self, sizes: Sizes, dtype, rngs: nnx.Rngs):
        self.heads = sizes.heads
        self.qkv = nnx.Linear(sizes.width, 3 * sizes.width, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(sizes.width, sizes.width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        b, s, n = x.shape
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(b, s, 3, self.heads, n // self.heads), 2, 0)
        logits = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(n // self.heads)
        causal = jnp.arange(s)[:, None] >= jnp.arange(s)[None, :]
        weights = jtops.softmax(logits, where=causal)
        return self.out(jnp.einsum("bhst,bthd->bshd", weights, v).reshape(b, s, n))


class Block(nnx.Module):
    def __init__(self, sizes: Sizes, dtype, rngs: nnx.Rngs):
        self.norm1, self.norm2 = LayerNorm(sizes.width), LayerNorm(sizes.width)
        self.attention = Attention(sizes, dtype, rngs)
        self.up = nnx.Linear(sizes.width, 4 * sizes.width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * sizes.width, sizes.width, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = jtops.add(x, self.attention(self.norm1(x)))
        return jtops.add(x, self.down(jax.nn.gelu(self.up(self.norm2(x)))))


class LanguageModel(nnx.Module):
    def __init__(self, sizes: Sizes, dtype, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, sizes.width, dtype=dtype, rngs=rngs)
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (sizes.length, sizes.width)))
        self.blocks = nnx.List([Block(sizes, dtype, rngs) for _ in range(sizes.layers)])
        self.norm = LayerNorm(sizes.width)
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


def draw(rng: np.random.Generator, text: np.ndarray, sizes: Sizes) -> np.ndarray:
    starts = rng.integers(0, len(text) - sizes.length - 1, sizes.batch)
    return text[starts[:, None] + np.arange(sizes.length + 1)]


def validate(model, text: np.ndarray, sizes: Sizes, batches: int = 16) -> float:
    """Bits per byte over the same windows every time."""
    rng = np.random.default_rng(1)
    return float(np.mean([valid_step(model, draw(rng, text, sizes)) for _ in range(batches)])) / math.log(2)


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


def main() -> int:
    gpu = jax.default_backend() == "gpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000 if gpu else 600)
    parser.add_argument("--implementation", choices=["triton", "xla", "interpret"], help="default: Triton on a GPU, XLA elsewhere")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if gpu else "float32", help="of activations")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("out/train_lm.png"))
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    args = parser.parse_args()
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
    where = f"{jax.devices()[0].device_kind}, {args.implementation or ('triton' if gpu else 'xla')}, {args.dtype}"
    print(f"{len(train) / 1e6:.1f} MB of Python to learn from, {parameters / 1e6:.2f} M parameters, on {where}")

    rng = np.random.default_rng(args.seed)
    losses: list[jax.Array] = []
    curve = [(0, validate(model, valid, sizes))]
    seconds, mark = 0.0, collections.deque([time.perf_counter()], maxlen=1)
    every = max(1, args.steps // 8)
    with tqdm(total=args.steps, unit="step", dynamic_ncols=True) as bar:
        for step in range(1, args.steps + 1):
            losses.append(train_step(model, optimizer, draw(rng, train, sizes)))
            if step == 1:  # compiled; from here on it is training
                losses[0].block_until_ready()
                mark.append(time.perf_counter())
            if step % every == 0 or step == args.steps:
                losses[-1].block_until_ready()
                seconds += time.perf_counter() - mark[0]
                curve.append((step, validate(model, valid, sizes)))
                bar.set_postfix_str(f"validation {curve[-1][1]:.3f} bits per byte")
                mark.append(time.perf_counter())
            bar.update()

    final = curve[-1][1]
    picture(args.picture, [float(x) / math.log(2) for x in losses], curve, unigram)
    speed = (args.steps - 1) * sizes.batch * sizes.length / max(seconds, 1e-9)
    print(f"\n{'unigram model':24}{unigram:8.3f} bits per byte")
    print(f"{'before training':24}{curve[0][1]:8.3f} bits per byte")
    print(f"{'after training':24}{final:8.3f} bits per byte")
    print(f"{'speed':24}{speed:8,.0f} tokens per second")
    print(f"{'picture':24}{args.picture}")
    if not final < unigram:
        print("The model does not beat the unigram model.")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
