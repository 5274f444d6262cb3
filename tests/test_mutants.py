"""The list of mutants fits the sources that there are; `make test-mutants` runs them."""

import ast

from tests.mutants import MUTANTS, ROOT, lacking, mutated


def test_every_mutant_changes_one_place():
    for mutant in MUTANTS:
        changed = mutated(mutant)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / mutant.file).read_text())), mutant.name


def test_every_mutant_has_tests():
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        assert not lacking(mutant), mutant.name


def test_names_are_distinct():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
