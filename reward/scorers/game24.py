"""Check of Game of 24 answers: Python's parser reads them, and only exact fractions are computed."""

import ast
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

TARGET = 24
MAX_CHARS = 200
MAX_DEPTH = 16

# No leading zeros, and ASCII digits only. A blank separates digits and never joins them.
_TOKEN = re.compile(r" *([1-9][0-9]{0,3}|[-+*/()])")
_ASCII_OPERATORS = str.maketrans({"×": "*", "÷": "/", "−": "-", "\t": " ", "\r": " ", "\n": " "})
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def is_solution(text: str, numbers: Sequence[int], target: int = TARGET) -> bool:
    """Return whether the text uses each number exactly once and equals the target; it may end with `= 24`."""
    if len(text) > MAX_CHARS:
        return False
    plain = text.translate(_ASCII_OPERATORS).strip(" ")
    plain = re.sub(rf"= *{target} *$", "", plain).rstrip(" ")
    tokens = _TOKEN.findall(plain)
    depths = accumulate((token == "(") - (token == ")") for token in tokens)
    # Checked before anything is computed: few and small numbers bound the arithmetic.
    used = sorted(int(token) for token in tokens if token.isdigit())
    if _TOKEN.sub("", plain) or used != sorted(numbers) or max(depths, default=0) > MAX_DEPTH:
        return False
    try:
        # Blanks keep two signs apart, so that no operator of Python appears that the rules do not know.
        return _value(ast.parse(" ".join(tokens), mode="eval").body) == target
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False


def _value(node: ast.expr) -> Fraction:
    """Return the value of + - * / on whole numbers. Raise ValueError for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            value: Fraction = _OPERATIONS[type(sign)](_value(left), _value(right))
            return value
    raise ValueError("only numbers, + - * / and brackets are allowed")
