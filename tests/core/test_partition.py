"""Decisions about shardings, by themselves: nothing is compiled, and meshes are only named."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jtops._compat import jax as jax_compat
from jtops.core.mesh.partition import Axes, decide, mesh_of, parse_arrays

MESH = {"x": 4, "y": 2}


def axes(rule: str, whole: str = "") -> Axes:
    ins, outs = map(parse_arrays, rule.split("->"))
    return Axes(ins, outs, frozenset(whole.split()))


def test_arrays_of_a_rule():
    assert parse_arrays("s (g r) d, t, ()") == ((("s",), ("g", "r"), ("d",)), (("t",),), ())
    assert parse_arrays("  ") == ()


ATTENTION = axes("b s (g r) d, b t g d -> b s (g r) d", "t d")
NORM = axes("b n, n -> b n", "n")
GRADIENT = axes("b n, b n -> n", "n")


@pytest.mark.parametrize(
    ("rule", "shapes", "specs", "placed", "sums"),
    [
        # Rows stay where they are; what must be whole is gathered.
        (NORM, [(8, 6), (6,), (8, 6)], [P("x"), P(), P()], ["x -", "-", "x -"], [()]),
        (NORM, [(8, 6), (6,), (8, 6)], [P("x", "y"), P("y"), P()], ["x -", "-", "x -"], [()]),
        (NORM, [(8, 6), (6,), (8, 6)], [P(("y", "x")), P(), P()], ["yx -", "-", "yx -"], [()]),
        # A size that the mesh axis does not divide, with both or one of two.
        (NORM, [(6, 8), (8,), (6, 8)], [P("x"), P(), P()], ["- -", "-", "- -"], [()]),
        (NORM, [(4, 8), (8,), (4, 8)], [P(("x", "y")), P(), P()], ["- -", "-", "- -"], [()]),
        # The result says it where no operand does; the first that shards an axis decides.
        (NORM, [(8, 6), (6,), (8, 6)], [P(), P(), P("y")], ["y -", "-", "y -"], [()]),
        (GRADIENT, [(8, 6), (8, 6), (6,)], [P("x"), P("y"), P()], ["x -", "x -", "-"], [("x",)]),
        (GRADIENT, [(8, 6), (8, 6), (6,)], [P(), P("y"), P()], ["y -", "y -", "-"], [("y",)]),
        # One mesh axis cannot split two axes.
        (axes("m n -> m n"), [(8, 8), (8, 8)], [P(None, "x"), P("x")], ["- x", "- x"], [()]),
        (axes("m, n -> m n"), [(8,), (8,), (8, 8)], [P("x"), P("x"), P()], ["x", "-", "x -"], [()]),
        (axes("m, n -> m n"), [(8,), (8,), (8, 8)], [P("x"), P(("y", "x")), P()], ["x", "-", "x -"], [()]),
        (axes("m, n -> m n"), [(8,), (8,), (8, 8)], [P("x"), P("y"), P()], ["x", "y", "x y"], [()]),
        # Query heads and key heads together, by the latter's number; a head of its own is no axis to split.
        (ATTENTION, [(2, 6, 8, 16), (2, 6, 4, 16), (2, 6, 8, 16)], [P(None, None, "x"), P(), P()],
         ["- - x -", "- - x -", "- - x -"], [()]),
        (ATTENTION, [(2, 6, 8, 16), (2, 6, 2, 16), (2, 6, 8, 16)], [P(None, None, "x"), P(), P()],
         ["- - - -", "- - - -", "- - - -"], [()]),
        (ATTENTION, [(2, 6, 8, 16), (2, 6, 2, 16), (2, 6, 8, 16)], [P(), P(None, None, "y"), P()],
         ["- - y -", "- - y -", "- - y -"], [()]),
        # Of one key head all query heads are the second axis of the dim, of which the names' first is now the only one.
        (ATTENTION, [(2, 6, 8, 16), (2, 6, 1, 16), (2, 6, 8, 16)], [P(None, None, "x"), P(), P()],
         ["- - x -", "- - - -", "- - x -"], [()]),
        # A dim of size 1 is broadcast, and nobody's axis.
        (axes("b n, b n -> b n"), [(8, 6), (1, 6), (8, 6)], [P("x"), P(), P()], ["x -", "- -", "x -"], [()]),
        (axes("b n, b n -> b n"), [(1, 6), (8, 6), (8, 6)], [P(), P("x"), P()], ["- -", "x -", "x -"], [()]),
    ],
)  # fmt: skip
def test_decisions(rule, shapes, specs, placed, sums):
    got = decide(rule, shapes, MESH, specs)

    def said(spec):
        entries = [e if isinstance(e, tuple) else (e,) if e else () for e in spec]
        return " ".join("".join(e) or "-" for e in entries)

    assert [said(spec) for spec in (*got.ins, *got.outs)] == placed
    assert list(got.sums) == sums


def test_every_decision_is_legal():
    """Whatever is shown: no mesh axis twice in an array, every dim divided, nothing whole split, sums over what results lack."""
    options = [None, "x", "y", ("x", "y"), ("y", "x")]
    rule = axes("b (g r) n, b g, n -> b (g r) n, g, n", "n")
    shapes = [(8, 8, 4), (8, 4), (4,), (8, 8, 4), (4,), (4,)]
    specs = [P(a, b, c) for a, b, c in itertools.product(options, repeat=3)]
    for x, y in itertools.product(specs[::3], options):
        got = decide(rule, shapes, MESH, [x, P(None, y), P(y), x, P(), P()])
        used = lambda spec: [a for e in spec for a in (e if isinstance(e, tuple) else (e,) if e else ())]
        for spec, shape in zip((*got.ins, *got.outs), shapes, strict=True):
            assert len(set(used(spec))) == len(used(spec))
            for entry, size in zip(spec, shape, strict=True):
                assert size % int(np.prod([MESH[a] for a in used(P(entry))], dtype=int)) == 0
        assert (got.ins[0][2], got.ins[2], got.outs[2]) == (None, P(None), P(None))
        over = {a for spec in got.ins for a in used(spec)}
        for spec, summed in zip(got.outs, got.sums, strict=True):
            assert set(summed) == over - set(used(spec))
            assert len(set(summed)) == len(summed)


def test_the_mesh_of_a_call():
    """The context's, else the first that an operand has."""
    mesh = lambda name: AbstractMesh((2,), (name,), axis_types=(AxisType.Explicit,))
    aval = lambda m: jax_compat.shaped_array((4,), "float32", frozenset(), NamedSharding(m, P()))
    assert mesh_of([]).empty
    assert mesh_of([aval(AbstractMesh((), ()))]).empty
    assert mesh_of([aval(AbstractMesh((), ())), aval(mesh("a")), aval(mesh("b"))]) == mesh("a")
    with jax.sharding.use_abstract_mesh(mesh("c")):
        assert mesh_of([aval(mesh("a"))]) == mesh("c")
