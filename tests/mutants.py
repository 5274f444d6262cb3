"""Named faults of one line, each of which some test must catch: ``make test-mutants``, or ``python -m tests.mutants NAME ...``.

A mutant is put into a copy of the checkout, where the tests that must fail are run. One that survives is a hole in the tests, or
equivalent to what it replaces: then its place is not here.
"""

import argparse
import dataclasses
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    file: str
    old: str  # is replaced wherever it stands
    new: str
    tests: tuple[str, ...]  # arguments of pytest that select those of which one must fail


_MASK = "jtops/kernels/attention/mask.py"
_ATTENTION = "tests/kernels/test_flash_attention.py"
_RANGES = (_ATTENTION, "-k", "ranges")
MUTANTS = (
    Mutant("keys stop one short", _MASK, "last + shift + mask.right + 1)", "last + shift + mask.right)", _RANGES),
    Mutant("unmasked middle too long", _MASK, "first + shift + mask.right + 1)", "last + shift + mask.right + 1)", _RANGES),
    Mutant("unmasked middle too early", _MASK, "tl.maximum(full_start, last + ", "tl.maximum(full_start, first + ", _RANGES),
    Mutant("queries start without offset", _MASK, "first - mask.right - shift - offset", "first - mask.right - shift", _RANGES),
    Mutant("queries stop one short", _MASK, "last + mask.left - shift - offset + 1", "last + mask.left - shift - offset", _RANGES),
    # tl.minimum(s, q_length) in query_range walks over blocks that `sees` masks: the same results.
    Mutant("queries past the length of a later shard", "jtops/kernels/attention/portable/backward.py",
           "rows_inside = tl.minimum(s, q_length - offset)", "rows_inside = tl.minimum(s, q_length)",
           (_ATTENTION, "-k", "later_shards")),
    Mutant("key lengths not clamped", _MASK, "operand_row(mask.kv_lengths, b)).to(tl.int32), kv_length)",
           "operand_row(mask.kv_lengths, b)).to(tl.int32), 1 << 30)", (_ATTENTION, "-k", "past_the_end")),
    Mutant("the reference's lengths not clamped", _MASK, "jnp.minimum(given, size)[", "given[", (_ATTENTION, "-k", "past_the_end")),
    Mutant("negative ids see each other", _MASK, "& (q_ids == kv_ids) & (kv_ids >= 0)", "& (q_ids == kv_ids)",
           (_ATTENTION, "-k", "negative_ids or case_4")),
    Mutant("keys split over devices", "jtops/kernels/attention/op.py", 'whole="t d e"', 'whole="d e"',
           ("tests/kernels/test_sharding.py", "--slow", "-k", "auto_features and flash_attention")),
)  # fmt: skip


def caught(mutant: Mutant) -> str | None:
    """None, or why the mutant lives."""
    text = (ROOT / mutant.file).read_text()
    if mutant.old not in text:
        return f"{mutant.old!r} is not in {mutant.file} any more: bring the mutant up to date"
    with tempfile.TemporaryDirectory() as copy:
        for name in ("jtops", "tests", "benchmarks", "conftest.py", "pyproject.toml"):
            link = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            link(ROOT / name, Path(copy) / name)
        (Path(copy) / mutant.file).write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:benchmark", "-p", "no:cacheprovider", *mutant.tests]
        run = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if run.returncode == 1:
        return None
    return "no test failed" if run.returncode == 0 else f"pytest did not run: {(run.stdout + run.stderr)[-500:]}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", help="parts of names; all if none is given")
    names = parser.parse_args().name
    alive = 0
    for mutant in MUTANTS:
        if not names or any(n in mutant.name for n in names):
            reason = caught(mutant)
            alive += reason is not None
            print(f"{'caught' if reason is None else 'ALIVE '}  {mutant.name}{'' if reason is None else f': {reason}'}", flush=True)
    sys.exit(f"{alive} alive" if alive else 0)


if __name__ == "__main__":
    main()
