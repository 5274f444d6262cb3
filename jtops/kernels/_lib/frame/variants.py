"""Variants: kernels that compute the same stage for different GPUs, dtypes or sizes. A call takes the first that fits."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jtops.errors import UnsupportedError
from jtops.kernels._lib.frame.launch import Launch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A launcher of a stage, and which calls it serves.

    `run` takes what a launcher takes, `blocks` are those that a `Config` for it must have. `unfit` and `slow`, which are given the
    launch and the operands, say why it cannot serve a call, and why it would but later ones are quicker, or None. A config that
    concerns the variant is not asked for the latter. The last variant of a stage needs neither: it serves every call.
    """

    name: str
    blocks: frozenset[str]
    run: Callable[..., tuple]
    unfit: Callable[[Launch, Any], str | None] = lambda launch, x: None
    slow: Callable[[Launch, Any], str | None] = lambda launch, x: None


def settled(launch: Launch, launcher: Callable | tuple[Variant, ...], x) -> tuple[Launch, Callable]:
    """The launcher for this call, and the launch as it is told: `launcher` itself, or that of the first variant that fits.

    A config concerns the variants that have its blocks, and its name if it gives one; a config without blocks concerns all variants
    of that name. A stage without such a variant ignores it, because the kernels of one call have different blocks.

    Raises:
      UnsupportedError: the config concerns variants of this stage, and none of them fits.
    """
    if not isinstance(launcher, tuple):
        return launch, launcher
    config, candidates = launch.config, launcher
    concerned: tuple[Variant, ...] = ()
    if config is not None:
        concerned = tuple(v for v in launcher if config.concerns(v.name, v.blocks))
        candidates = concerned or launcher
        config = config.plain() if concerned and config.blocks else None
    launch = dataclasses.replace(launch, config=config)
    reasons: list[str] = []
    for variant in candidates:
        reason = variant.unfit(launch, x)
        if reason is None and not concerned:
            reason = variant.slow(launch, x)
        if reason is None:
            passed = f" ({'; '.join(reasons)})" if reasons else ""
            return dataclasses.replace(launch, variant=variant.name, why=variant.name + passed), variant.run
        reasons.append(f"{variant.name}: {reason}")
    raise UnsupportedError(f"{launch.op}: no kernel for this call is as its config asks. {'; '.join(reasons)}.")
