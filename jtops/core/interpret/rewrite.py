"""The rewriting of a kernel's source to Triton's meaning of Python's statements, where Python itself takes another.

Compiled, ``x = 2`` makes a number of the machine (int32, which wraps and whose ``//`` truncates) and not a constant, ``and``,
``or`` and ``not`` work on every element of a block, and a block has no truth value. Python knows none of that and lets no object
change it, so these places, and no others, become calls of the functions that `CALLS` names.
"""

import ast
import types
from typing import Any

VALUE, UNWRAP, TEST, NOT, AND, OR = CALLS = tuple(f"__jtops_{name}" for name in ("value", "unwrap", "test", "not", "and", "or"))
_FACTORY = "__jtops_factory"


class _Rewriter(ast.NodeTransformer):
    """The transformer of the syntax tree that puts the calls in."""

    @staticmethod
    def _call(name: str, node: ast.expr, *args: ast.expr) -> ast.expr:
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(args) or [node], []), node)

    def visit_Assign(self, node):
        self.generic_visit(node)
        node.value = self._call(VALUE, node.value)
        return node

    def visit_AnnAssign(self, node):
        constant = ast.unparse(node.annotation).strip("'\"").split(".")[-1] == "constexpr"
        if node.value is None or constant:
            return self.generic_visit(node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_AugAssign(self, node):
        read = ast.copy_location(ast.Name(getattr(node.target, "id", "?"), ast.Load()), node.target)
        value = ast.copy_location(ast.BinOp(read, node.op, node.value), node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], value), node))

    def visit_Return(self, node):
        self.generic_visit(node)
        if node.value is not None:
            node.value = self._call(VALUE, node.value)
        return node

    def _visit_test(self, node):
        self.generic_visit(node)
        node.test = self._call(TEST, node.test)
        return node

    visit_If = visit_While = visit_IfExp = visit_Assert = _visit_test  # noqa: N815

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        return self._both(node, AND if isinstance(node.op, ast.And) else OR, node.values)

    def visit_Compare(self, node):
        self.generic_visit(node)
        if len(node.ops) == 1:
            return node
        terms = [node.left, *node.comparators]
        pairs = zip(terms, node.ops, terms[1:], strict=False)
        return self._both(node, AND, [ast.copy_location(ast.Compare(a, [op], [b]), node) for a, op, b in pairs])

    def _both(self, node, name, values):
        nothing = ast.arguments([], [], None, [], [], None, [])
        return self._call(name, node, *(ast.copy_location(ast.Lambda(nothing, v), v) for v in values))

    def visit_UnaryOp(self, node):
        self.generic_visit(node)
        return self._call(NOT, node, node.operand) if isinstance(node.op, ast.Not) else node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        return self._call(UNWRAP, node, node.value) if node.attr == "value" and isinstance(node.ctx, ast.Load) else node


def _factory_code(kernel) -> types.CodeType:
    tree: Any = ast.parse(kernel.src)
    (function,) = tree.body
    function.decorator_list, function.returns = [], None
    function.args.defaults, function.args.kw_defaults = [], [None] * len(function.args.kwonlyargs)
    for arg in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
        arg.annotation = None
    _Rewriter().generic_visit(function)
    result = ast.Return(ast.Name(function.name, ast.Load()))
    wrapped = ast.FunctionDef(_FACTORY, ast.arguments([], [], None, [], [], None, []), [function, result], [], type_params=[])
    tree.body = [wrapped]
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, def_line(kernel) - 1)
    return compile(tree, kernel.fn.__code__.co_filename, "exec")


def def_line(kernel) -> int:
    """The line of its file on which the ``def`` of `kernel` stands."""
    return kernel.starting_line_number + next(i for i, text in enumerate(kernel.raw_src) if text.lstrip().startswith("def "))


def function(kernel, scope: dict[str, Any]) -> types.FunctionType:
    """The rewritten Python function of a ``triton.jit`` one, with `scope` as its globals, those of its closure included."""
    made = vars(kernel).get("_jtops_code")
    if made is None or made[0] != kernel.src:
        made = kernel._jtops_code = (kernel.src, _factory_code(kernel))
    exec(made[1], scope)  # its own source, which its author handed to Triton to run
    plain = scope.pop(_FACTORY)()
    plain.__defaults__ = tuple(getattr(d, "value", d) for d in kernel.fn.__defaults__ or ()) or None
    plain.__kwdefaults__ = {n: getattr(d, "value", d) for n, d in (kernel.fn.__kwdefaults__ or {}).items()}
    return plain
