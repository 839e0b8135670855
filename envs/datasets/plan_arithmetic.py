"""What the code of a plan computes: integers, names, and + - *; never run, only read."""

import ast
import operator
from collections.abc import Callable, Iterator

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def result_of(code: str, names: dict[str, int]) -> int:
    """What the code of a plan prints; assignments are left in `names`, as the sandbox keeps them."""
    value = 0
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            names[statement.targets[0].id] = _value(statement.value, names)
        elif isinstance(statement, ast.Expr):
            value = _value(statement.value, names)
    return value


def partial_results(code: str, names: dict[str, int]) -> set[int]:
    """The values of the operations inside the code's expressions, the whole of an expression left out."""
    return {
        _value(inner, dict(names))
        for statement in ast.parse(code).body
        if isinstance(statement, ast.Assign | ast.Expr)
        for inner in _operations(statement.value)
        if inner is not statement.value
    }


def _operations(node: ast.expr) -> Iterator[ast.BinOp]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.BinOp))


def _value(node: ast.expr, names: dict[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=symbol, right=right):
            return _OPERATORS[type(symbol)](_value(left, names), _value(right, names))
    raise ValueError(f"not the arithmetic of a plan: {ast.dump(node)}")
