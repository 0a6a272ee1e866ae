"""Edits of Python sources, by their syntax tree."""

from __future__ import annotations

import ast
import re

from tests.mutants.edit import Edit

_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
"""How it is spelled, as a pattern, and what takes its place."""

_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
}
_OTHER_CALL = {"min": "max", "max": "min", "any": "all", "all": "any"}


def python_edits(content: bytes) -> list[Edit]:
    """Annotations, decorators, docstrings and messages of errors are left alone."""
    finder = _Finder(content)
    finder.visit(ast.parse(content))
    return finder.edits


class _Finder(ast.NodeVisitor):
    def __init__(self, content: bytes) -> None:
        self.edits: list[Edit] = []
        self._content = content
        self._starts = [0]
        for line in content.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._statement = (0, 0)

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        outer = self._statement
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        self._statement = (node.lineno, max(node.lineno, last))
        super().visit(node)
        self._statement = outer

    # What is left alone

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Its parts have no places of their own before Python 3.12."""

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_arg(self, node: ast.arg) -> None: ...

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("removed statement", node, "pass")

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in [*node.args.defaults, *node.args.kw_defaults, *node.body]:
            if each is not None:
                self.visit(each)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in node.body:
            self.visit(each)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    # What is changed

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            pattern, *others = _COMPARISONS[type(operator)]
            for other in others:
                self._between("comparison", left, right, pattern, other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC:
            self._between("arithmetic", node.left, node.right, *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _ARITHMETIC:
            self._between("arithmetic", node.target, node.value, *_ARITHMETIC[type(node.op)])
        self._add("removed statement", node, "pass")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pattern, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("and/or", left, right, rf"\b{pattern}\b", other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("negation", node, f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add("constant", node, str(not value))
        elif isinstance(value, int):
            self._add("constant", node, str(value + 1))
            self._add("constant", node, f"({value - 1})")
        elif isinstance(value, float):
            self._add("constant", node, repr(2 * value or 1.0))

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self._add("forced condition", node.test, "True")
        self._add("forced condition", node.test, "False")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_While(self, node: ast.While) -> None:
        self._add("forced condition", node.test, "False")
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._add("forced condition", condition, "True")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        is_constant = isinstance(node.value, ast.Constant)
        if node.value is not None and not is_constant:
            self._add("return value", node.value, "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self._add("removed statement", node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add("removed statement", node, "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add("removed statement", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("removed statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("removed statement", node, "pass")

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in _OTHER_CALL:
            self._add("other call", node.func, _OTHER_CALL[node.func.id])
        if not any(isinstance(argument, ast.Starred) for argument in node.args):
            for left, right in zip(node.args, node.args[1:], strict=False):
                self._swap(left, right)
        self.generic_visit(node)

    # Where it is

    def _swap(self, left: ast.expr, right: ast.expr) -> None:
        (start, left_end), (right_start, end) = self._place(left), self._place(right)
        middle = self._content[left_end:right_start].decode()
        swapped = self._text(right) + middle + self._text(left)
        if self._text(left) != self._text(right):
            self._replace("swapped arguments", start, end, swapped, left.lineno)

    def _between(
        self, operator: str, left: ast.expr, right: ast.expr, pattern: str, other: str
    ) -> None:
        """Replace what lies between two operands, brackets around them aside."""
        start, end = self._place(left)[1], self._place(right)[0]
        gap = re.search(pattern, self._content[start:end].decode())
        assert gap is not None
        line = self._content.count(b"\n", 0, start + gap.start()) + 1
        self._replace(operator, start + gap.start(), start + gap.end(), other, line)

    def _add(self, operator: str, node: ast.stmt | ast.expr, replacement: str) -> None:
        start, end = self._place(node)
        self._replace(operator, start, end, replacement, node.lineno)

    def _replace(self, operator: str, start: int, end: int, replacement: str, line: int) -> None:
        edit = Edit(operator, start, end, replacement.encode(), line, self._statement)
        if self._content[start:end] != edit.replacement:
            self.edits.append(edit)

    def _place(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.expr) -> str:
        start, end = self._place(node)
        return self._content[start:end].decode()
