"""What is written into tests before they are compiled: proof that a body reached its end, checks at each assert, canaries.

Only syntax trees are handled here, in the parent, before any code under test can be imported. A mark is a call of a string
constant; once compiled, the constant is replaced by the function itself, so that no name exists that could be rebound.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from typing import NamedTuple

CHECK = "\0dsec:check"
ENTER = "\0dsec:enter"
WEIGH = "\0dsec:weigh"
EQUAL = "\0dsec:equal"
SEAL = "\0dsec:seal"
GLOBALS = "\0dsec:globals"
FAIL = "\0dsec:fail"
END = "\0dsec:end:"
_OPERATORS = {
    ast.Eq: "==", ast.NotEq: "!=", ast.In: "in", ast.NotIn: "not in",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


class Canary(NamedTuple):
    """A test that must fail. path: of its id, without parameters."""

    path: str
    name: str


class Marked(NamedTuple):
    """One test file: its tree with marks, the ids' paths of its marked functions by index, its canaries."""

    tree: ast.Module
    paths: dict[int, str]
    canaries: tuple[Canary, ...]


def mark(source: bytes, file: str, first: int, dice: random.Random, canaries: int) -> Marked:
    """Mark the tests of one file. file: relative to the workspace, as ids have it; first: the lowest index that is free."""
    tree = ast.parse(source, filename=file)
    planted = _plant(tree, file, dice, canaries)
    marker = _Marker(file, first)
    marker.visit(tree)
    first_code = next((at for at, node in enumerate(tree.body) if not _is_prologue(node)), len(tree.body))
    for at in range(len(tree.body) - 1, first_code - 1, -1):  # decorators are called here
        tree.body.insert(at, _at(ast.Expr(_call(CHECK)), tree.body[at]))
    tree.body.append(_sealing(tree))
    ast.fix_missing_locations(tree)
    return Marked(tree, marker.paths, planted)


def mark_helper(source: bytes, file: str) -> ast.Module:
    """Of a module that tests import: its asserts are weighed and it is sealed; it has no ends."""
    tree = ast.parse(source, filename=file)
    _Marker(file, 0, ends=False).visit(tree)
    tree.body.append(_sealing(tree))
    ast.fix_missing_locations(tree)
    return tree


def _sealing(tree: ast.Module) -> ast.stmt:
    return _at(ast.Expr(_call(SEAL, ast.Call(ast.Constant(GLOBALS), [], []))), tree.body[-1] if tree.body else None)


def _plant(tree: ast.Module, file: str, dice: random.Random, count: int) -> tuple[Canary, ...]:
    """Put failing tests between the real ones, under names made of words that occur there."""
    spots = [
        number
        for number, node in enumerate(tree.body)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    taken = set(names)
    words = sorted({word for name in names for word in name.split("_") if word.isalpha() and word != "test"})
    planted = []
    for spot in sorted(dice.choices(spots, k=count), reverse=True) if spots else ():
        name = "test_" + "_".join(dice.choices(words or ["value"], k=2))
        while name in taken:
            name += f"_{dice.randrange(10)}"
        taken.add(name)
        tree.body.insert(spot, _canary(name, dice, tree.body[spot]))
        planted.append(Canary(f"{file}::{name}", name))
    return tuple(planted)


def _canary(name: str, dice: random.Random, where: ast.stmt) -> ast.stmt:
    """Compares values that differ, in one of the ways in which tests compare. It fails without a traceback: nobody reads it."""
    number = dice.randrange(1000)
    left, right = dice.choice(
        [
            (f"len('{'x' * (number % 17)}')", str(number % 17 + 1)),
            (f"[{number}, {number + 1}]", f"[{number}]"),
            (f"'{number}'.upper()", f"'{number}x'"),
            (f"sorted({{{number}, {number + 3}}})", f"[{number + 3}, {number}]"),
        ]
    )
    body = (
        f"def {name}():\n    value = {left}\n    try:\n        assert value == {right}\n"
        f"    except AssertionError:\n        {FAIL!r}()\n"
    )
    made = ast.parse(body).body[0]
    for node in ast.walk(made):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = where.lineno
            node.col_offset = node.end_col_offset = 0
    return made


def _is_prologue(node: ast.stmt) -> bool:
    """A docstring, or what must stand before anything else."""
    return _is_text(node) or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


class _Marker(ast.NodeTransformer):
    """Adds an end to each test function, and checks to each assert of the file."""

    def __init__(self, file: str, first: int, *, ends: bool = True) -> None:
        self._with_ends = ends
        self.paths: dict[int, str] = {}
        self._next = first
        self._path = [file]
        self._depth = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._path.append(node.name)
        self.generic_visit(node)
        self._path.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        _check_each(node)
        if self._with_ends and self._depth == 0 and node.name.startswith("test") and not _yields(node):
            number, self._next = self._next, self._next + 1
            self.paths[number] = "::".join((*self._path, node.name))
            _Ends(number, _untouched(node)).finish(node)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        node.body = _checked_at_last(node.body, node.body[-1])
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        node.body = _checked_at_last(node.body, node.body[-1])
        return node

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        """Operands of a comparison are weighed before they are compared; both are evaluated once, in their order."""
        before = [_at(ast.Expr(_call(CHECK)), node)]
        after: list[ast.stmt] = []
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPERATORS:
            names = (f"@left{node.lineno}", f"@right{node.lineno}")
            operands = (test.left, test.comparators[0])
            for name, operand in zip(names, operands, strict=True):
                before.append(_at(ast.Assign([ast.Name(name, ast.Store())], operand), node))
            left, right = (ast.Name(name, ast.Load()) for name in names)
            before.append(_at(ast.Expr(_call(WEIGH, ast.Constant(_OPERATORS[type(test.ops[0])]), left, right)), node))
            test.left, test.comparators = (ast.Name(names[0], ast.Load()), [ast.Name(names[1], ast.Load())])
            clear: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
            after.append(_at(ast.Assign(clear, ast.Constant(None)), node))
        else:
            node.test = _weighed(test)
        return [*before, node, *after]


def _weighed(value: ast.expr) -> ast.expr:
    """Comparisons whose truth alone counts: of `a == b and not c == d`, and of `all(a == b for ...)`. Others may build values."""
    match value:
        case ast.Compare(ops=[ast.Eq()]):
            return ast.copy_location(_call(EQUAL, value.left, value.comparators[0]), value)
        case ast.BoolOp():
            value.values = [_weighed(one) for one in value.values]
        case ast.UnaryOp(op=ast.Not()):
            value.operand = _weighed(value.operand)
        case ast.Call(func=ast.Name(id="all" | "any"), args=[ast.GeneratorExp() | ast.ListComp() as each]):
            each.elt = _weighed(each.elt)
    return value


def _check_each(node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """A check before each statement that calls something, at the function's own level and in its `with` blocks."""
    blocks: list[list[ast.stmt]] = [node.body]
    while blocks:
        block = blocks.pop()
        for at in range(len(block) - 1, -1, -1):
            statement = block[at]
            if isinstance(statement, (ast.With, ast.AsyncWith)):
                inner = statement.body[0]  # checked at last, by then
                blocks.append(inner.body if isinstance(inner, ast.Try) else statement.body)
            if isinstance(statement, _CALLING) and not _is_text(statement):
                block.insert(at, _at(ast.Expr(_call(CHECK)), statement))


_CALLING = (ast.Expr, ast.With, ast.AsyncWith, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.If, ast.While)


def _checked_at_last(body: list[ast.stmt], where: ast.AST) -> list[ast.stmt]:
    """However a block is left: nothing has been replaced in it that its `with` or its caller relies on."""
    return [_at(ast.Try(body, [], [], [_at(ast.Expr(_call(CHECK)), where)]), where)]


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Ends(ast.NodeTransformer):
    """Marks every way out of one function that is no exception; functions inside it are others' business."""

    def __init__(self, number: int, given: Sequence[str]) -> None:
        self._number = number
        self._given = given

    def finish(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        last = node.body[-1]
        node.body = [out for statement in node.body for out in self._each(statement)]
        node.body.append(_at(self._end(), last))
        text = node.body[:1] if _is_text(node.body[0]) else []
        enter = _at(ast.Expr(_call(ENTER)), node.body[0])
        node.body = [*text, enter, *_checked_at_last(node.body[len(text) :], last)]

    def _each(self, statement: ast.stmt) -> list[ast.stmt]:
        done = self.visit(statement)
        return done if isinstance(done, list) else [done]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        if node.value is None:
            return [_at(self._end(), node), node]
        keep = _at(ast.Assign([ast.Name("@returned", ast.Store())], node.value), node)
        return [keep, _at(self._end(), node), _at(ast.Return(ast.Name("@returned", ast.Load())), node)]

    def _end(self) -> ast.stmt:
        pairs = [ast.Tuple([ast.Constant(name), ast.Name(name, ast.Load())], ast.Load()) for name in self._given]
        return ast.Expr(_call(f"{END}{self._number}", ast.Tuple(list[ast.expr](pairs), ast.Load())))


def _untouched(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The parameters of a test to which it never assigns, nor deletes them."""
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if one.arg != "self"]
    stored = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
    other = {name for one in ast.walk(node) if isinstance(one, ast.ExceptHandler) and (name := one.name)}
    return [name for name in names if name not in stored | other]


def _yields(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a generator: its body runs when somebody iterates, which is no test."""
    todo: list[ast.AST] = list(node.body)
    while todo:
        one = todo.pop()
        if isinstance(one, (ast.Yield, ast.YieldFrom)):
            return True
        if not isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(one))
    return False


def _call(what: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Constant(what), list(arguments), [])


def _at(node: ast.stmt, where: ast.AST | None) -> ast.stmt:
    """Gives it a place; what is inside gets it from there (`fix_missing_locations`)."""
    node.lineno = node.end_lineno = getattr(where, "lineno", 1)
    node.col_offset = node.end_col_offset = 0
    return node
