"""Arithmetic on accumulators of wgmma by inline assembly, where the compiler's own takes more registers or instructions.

A thread of a warpgroup holds two rows, eight apart, of an accumulator [64, N], and of each row the columns ``8 j + c`` and ``8 j +
c + 1`` for one even c below 8: element i is in the second row if ``i & 2``, and in column ``8 (i // 4) + i % 2`` from c on.
"""

from jtops._compat.gluon import gl, gluon


@gluon.constexpr_function
def _in_place(n, *inputs):
    """The assembly constraints for n floats changed in place, then n inputs of each kind."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + [kind for kind in inputs for _ in range(n)])


@gluon.constexpr_function
def _rescale_asm(n):
    # A warp multiplies all or nothing: the branch is uniform.
    return (
        "{ .reg .pred p, q;"
        f" setp.neu.f32 p, ${2 * n}, 0f3F800000; setp.neu.f32 q, ${2 * n + 2}, 0f3F800000; or.pred p, p, q;"
        " vote.sync.any.pred p, p, -1; @!p bra.uni DONE; "
        + "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i}; " for i in range(n))
        + "DONE: }"
    )


@gluon.jit
def rescale_rows(acc, factor):
    """`acc` with each row times its factor, or untouched where all factors of a warp are 1.

    The branch also holds the multiplications in their place: between two products that are issued, under the first.
    """
    n: gl.constexpr = acc.shape[1] // 2
    factors = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)).expand_dims(1) + gl.zeros_like(acc)
    return gl.inline_asm_elementwise(_rescale_asm(n), _in_place(n, "f"), [acc, factors], dtype=gl.float32, is_pure=False, pack=n)


@gluon.constexpr_function
def _cut_asm(n, two_sided, branch):
    lines = ["{ .reg .pred p; "]
    if branch:
        lines.append(f"setp.eq.s32 p, ${(4 if two_sided else 3) * n}, 0; @p bra.uni DONE; ")
    for i in range(n):
        column = 8 * (i // 4) + i % 2
        lines.append(f"setp.gt.s32 p, ${2 * n + (i & 2)}, {column}; ")
        if two_sided:
            lines.append(f"setp.le.and.s32 p, ${3 * n + (i & 2)}, {column}, p; ")
        lines.append(f"selp.f32 ${i}, ${i}, 0fFF800000, p; ")
    return "".join(lines) + "DONE: }"


@gluon.jit
def cut(acc, start, stop, needed):
    """`acc` with -inf in all columns of a row outside ``start <= column < stop``; `start` None: below all columns.

    Columns are compared with immediates, because numbers in registers, which the compiler's own comparison wants, would spill.
    Where `needed`, a number or None, is 0, nothing is done.
    """
    n: gl.constexpr = acc.shape[1] // 2
    first = (gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout)) & 6).expand_dims(0)
    rest = stop.expand_dims(1) - first
    if start is not None:
        begun = start.expand_dims(1) - first
        need = gl.full_like(rest, 0) + needed
        acc = gl.inline_asm_elementwise(
            _cut_asm(n, True, True),
            _in_place(n, "r", "r", "r"),
            [acc, rest, begun, need],
            dtype=gl.float32,
            is_pure=True,
            pack=n,
        )
    elif needed is not None:
        need = gl.full_like(rest, 0) + needed
        acc = gl.inline_asm_elementwise(
            _cut_asm(n, False, True), _in_place(n, "r", "r"), [acc, rest, need], dtype=gl.float32, is_pure=True, pack=n
        )
    else:
        acc = gl.inline_asm_elementwise(
            _cut_asm(n, False, False), _in_place(n, "r"), [acc, rest], dtype=gl.float32, is_pure=True, pack=n
        )
    return acc
