"""Parser of Game of 24 answers, or of another target; it evaluates exactly and never uses `eval`.

sum     = product (("+" | "-") product)*
product = operand (("*" | "/") operand)*
operand = number | "(" sum ")"
"""

import re
from collections.abc import Sequence
from fractions import Fraction

TARGET = 24
MAX_CHARS = 200
MAX_DEPTH = 16

# No leading zeros, and ASCII digits only. A blank separates digits and never joins them.
_TOKEN = re.compile(r" *([1-9][0-9]{0,3}|[-+*/()])")
_ASCII_OPERATORS = str.maketrans({"×": "*", "÷": "/", "−": "-", "\t": " ", "\r": " ", "\n": " "})


class _NotAnExpressionError(ValueError):
    pass


def is_solution(text: str, numbers: Sequence[int], target: int = TARGET) -> bool:
    """Return whether the text uses each number exactly once and equals the target; it may end with `= 24`."""
    if len(text) > MAX_CHARS:
        return False
    plain = text.translate(_ASCII_OPERATORS).strip(" ")
    try:
        tokens = _tokens(re.sub(rf"= *{target} *$", "", plain).rstrip(" "))
        # Checked before anything is computed: few and small numbers bound the arithmetic.
        if sorted(int(token) for token in tokens if token.isdigit()) != sorted(numbers):
            return False
        return _Parser(tokens).value() == target
    except (_NotAnExpressionError, ZeroDivisionError):
        return False


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _NotAnExpressionError
        tokens.append(match.group(1))
        position = match.end()
    return tokens


class _Parser:
    """Recursive-descent parser; its depth limit keeps nested brackets from exhausting the stack."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._position != len(self._tokens):
            raise _NotAnExpressionError
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self) -> Fraction:
        value = self._operand()
        while (sign := self._take("*", "/")) is not None:
            other = self._operand()
            value = value * other if sign == "*" else value / other
        return value

    def _operand(self) -> Fraction:
        if self._take("(") is None:
            return self._number()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NotAnExpressionError
        value = self._sum()
        if self._take(")") is None:
            raise _NotAnExpressionError
        self._depth -= 1
        return value

    def _number(self) -> Fraction:
        token = self._peek()
        if token is None or not token.isdigit():
            raise _NotAnExpressionError
        self._position += 1
        return Fraction(int(token))

    def _take(self, *wanted: str) -> str | None:
        token = self._peek()
        if token not in wanted:
            return None
        self._position += 1
        return token

    def _peek(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None
