"""Docstrings open with what the thing is or does: a sentence that starts and ends as one, not a fragment of it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "jtops").rglob("*.py"))

# Sentences that lack what they speak of ("Of the user's tables.", "Without blanks.", "The array's."), arrows in place of a verb,
# questions, and exceptions in place of what raises them.
FRAGMENT = re.compile(
    r"(Of|Without|With|To|By|From|For|In|Into|Per|As|Always|Never|Once|Those|That|Is|Are|Does|Do|Can)\b"
    r"|(Type|Value|Unsupported)Error\b"
    r"|->|.*\?$"
    r"|The (\w+ )?(same|\w+'s?)\.$"
    r"|(The )?[Ll]auncher[.:]"
)
START = re.compile(r"[A-Z`]|\w+: |jaxlib|layer_norm and|softmax, ")  # a capital, code, or the names of what a module defines

# Docstrings from before this rule: this list only gets shorter.
BEFORE = {
    "jtops/core/tuning/candidates.py": {"ArrayArgument.is_contiguous", "Named.get"},
    "jtops/core/tuning/processes.py": {"of_process_0"},
    "jtops/core/tuning/timing.py": {"seconds"},
    "jtops/kernels/_lib/frame/tuned.py": {"Choice.fingerprint", "forcing", "user_directory", "file_name", "tables"},
    "jtops/kernels/attention/hopper/backward.py": {"end_turn", "mask_assembly", "consumer", "parts_of", "backward"},
    "jtops/kernels/attention/hopper/backward_ends.py": {"preprocess_kernel", "postprocess_kernel"},
    "jtops/kernels/attention/hopper/forward.py": {
        *("Sizes", "count_of_tiles", "product", "matrix", "softmax", "head_block", "check", "forward"),
    },
}


def docstrings(path: Path) -> list[tuple[str, str]]:
    """(name, docstring) of the module and of all its public classes and functions."""
    found = []

    def walk(node, name):
        if text := ast.get_docstring(node):
            found.append((name or "the module", text))
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                walk(child, f"{name}.{child.name}".removeprefix("."))

    walk(ast.parse(path.read_text()), "")
    return found


def opening(text: str) -> str:
    """Up to the first period that ends a sentence; the whole paragraph where there is none."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    found = re.match(r"(``.*?``|`.*?`|.)*?[.?!](?=\s|$)", paragraph)
    return found[0] if found else paragraph


def faults(text: str) -> list[str]:
    sentence = opening(text)
    found = []
    if not START.match(sentence):
        found.append("does not start with a capital or code")
    if not sentence.endswith("."):
        found.append("does not end with a period")
    if FRAGMENT.match(sentence):
        found.append("is a fragment")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "Of the user's tables.",
        "Without blanks.",
        "The array's.",
        "The same.",
        "-> rows, columns.",
        "[n] -> [m].",
        "dx of rows.",
        "ValueError for tiles.",
        "Is it a kernel?",
        "Launcher.",
        "The size",
    ],
)
def test_fragment_is_found(text):
    assert faults(text)


@pytest.mark.parametrize(
    "text", ["The array's size.", "``a / b`` rounded up.", "jtops: ops for JAX.", "A row, e.g. of 3.5 GB.\n\nTo be read."]
)
def test_sentence_is_none(text):
    assert not faults(text)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_docstrings_are_sentences(path):
    before = BEFORE.get(str(path.relative_to(ROOT)), set())
    found = [(name, opening(text), faults(text)) for name, text in docstrings(path)]
    wrong = [f"{name}: {sentence!r} {', '.join(why)}" for name, sentence, why in found if why and name not in before]
    assert not wrong, "\n".join(wrong)
    assert before <= {name for name, _, why in found if why}, "no fragment any more: take it off BEFORE"
