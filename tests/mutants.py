"""Mutants: small faults put into the library one at a time, each of which some test must notice.

    python -m tests.mutants [NAME ...]    those whose name contains one of the words; all of them by default

Every mutant is applied in a copy of its own, never in the checkout, and there the tests that have to notice it run. Before that
they run in a copy as it is, where they have to pass. The exit status is 1 if a mutant survives, or cannot be judged.

Changes that were tried and are no faults, so that no test can notice them:

* `dkdv_kernel` not clearing keys and values of negative ids, `dq_kernel` not clearing values, the forward not clearing keys: NaN
  spoils a row or column of scores, which is replaced by selection. What takes part in a second product is cleared, and listed.
* `forward_kernel` and `dq_kernel` reading queries past q_length: they spoil their own rows alone, which are replaced as a whole.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("jtops", "tests", "conftest.py", "pyproject.toml")
SECONDS = 900  # for one mutant's tests; a mutant that makes them hang was noticed


class Mutant(NamedTuple):
    """`old`, which stands exactly once in `file`, becomes `new`; `tests` are node ids, of which one has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutants(file: str, *changes: tuple) -> list[Mutant]:
    return [Mutant(name, f"jtops/{file}", old, new, tests) for name, old, new, *tests in changes]


MUTANTS: list[Mutant] = []


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The changed file's text; ValueError where `old` does not stand in it exactly once."""
    text = (root / mutant.file).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has {count} times, where it must have once: {mutant.old!r}")
    return text.replace(mutant.old, mutant.new)


def lacking(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Those of its tests that there are not; parameters are not looked at."""
    found = []
    for test in mutant.tests:
        path, _, name = test.partition("::")
        file = root / path
        tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if name.partition("[")[0] not in names:
            found.append(test)
    return found


def _copy(directory: Path) -> Path:
    for name in COPIED:
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, directory / name)
    return directory


def _run(directory: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """pytest's exit status and its output, with the copy's own library. Copies share compiled kernels: their key is the content."""
    environment = os.environ | {
        "PYTHONPATH": str(directory),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TRITON_CACHE_DIR": str(directory.parent / "triton"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:benchmark", "-p", "no:cacheprovider", *options, *tests]
    try:
        run = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 1, f"no end in {SECONDS} s"
    return run.returncode, run.stdout + run.stderr


def judged(mutant: Mutant, scratch: Path) -> str:
    """Why a mutant is not as it should be; "" where its tests noticed it."""
    directory = Path(tempfile.mkdtemp(dir=scratch))
    try:
        text = mutated(mutant)
        _copy(directory)
        (directory / mutant.file).write_text(text)
        status, said = _run(directory, mutant.tests, "-x")
    except ValueError as error:
        return str(error)
    finally:
        shutil.rmtree(directory)
    if status == 1:
        return ""
    return "survives" if status == 0 else f"pytest ended with {status}: {' '.join(said.split()[-40:])}"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Change the library; some test must notice.")
    parser.add_argument("names", nargs="*", help="words, of which a mutant's name must contain one")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="how many mutants at once")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if not asked.names or any(word in m.name for word in asked.names)]
    if not chosen:
        parser.error(f"no mutant is called so; there are: {', '.join(m.name for m in MUTANTS)}")
    tests = list(dict.fromkeys(test for m in chosen for test in m.tests))
    with tempfile.TemporaryDirectory(prefix="jtops-mutants-") as scratch:
        print(f"{len(tests)} tests without any mutant ...", flush=True)
        (plain := Path(scratch) / "plain").mkdir()
        status, said = _run(_copy(plain), tests)
        if status != 0:
            print(f"{said}\nThey must pass before they can judge.")
            return 1
        verdicts = {}
        with ThreadPoolExecutor(asked.workers) as pool:
            runs = {pool.submit(judged, m, Path(scratch)): m for m in chosen}
            for done in as_completed(runs):
                verdicts[runs[done]] = verdict = done.result()
                print(f"{len(verdicts)}/{len(chosen)} {runs[done].name}: {verdict or 'noticed'}", flush=True)
    wrong = [m for m in chosen if verdicts[m]]
    width = max(len(m.name) for m in chosen)
    print("\n" + "\n".join(f"{m.name:{width}}  {m.file.removeprefix('jtops/')}: {verdicts[m] or 'noticed'}" for m in chosen))
    print(f"\n{len(chosen) - len(wrong)} of {len(chosen)} mutants were noticed.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
