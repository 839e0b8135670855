"""Scorers of mathematical answers, which are parsed with a small grammar and compared exactly."""

import ast
import importlib
import math
import operator
import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING

from reward.scorers.notation import bare_number, plain, read_number, unwrapped
from reward.scorers.process import scored

if TYPE_CHECKING:
    from sympy import Expr

MAX_CHARS = 200
MAX_DEPTH = 16
MAX_DIGITS = 1000
"""Largest estimated number of digits of a power: 9^9^9 has 370 million."""
MAX_MEMORY = 2**30
"""Bytes of the checking process."""
LIMIT_S = 5.0

_SPELLINGS = {
    **dict.fromkeys(("×", "·", "∙", "⋅", "∗", "\\cdot", "\\times"), "*"),
    **dict.fromkeys(("÷", "∕", "\\div"), "/"),
    **{"π": "\\pi", "√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]"},
    **dict.fromkeys(("\\dfrac", "\\tfrac", "\\cfrac"), "\\frac"),
    **dict.fromkeys(("\\left", "\\right", "\\displaystyle", "\\!"), ""),
    **dict.fromkeys(("\\,", "\\;", "\\:", "\\ ", "\\quad", "~"), " "),
    "**": "^",
}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)"
    r"|(?P<word>\\?(?:sqrt|frac|pi))(?![A-Za-z])|(?P<sign>[-+*/^(){}\[\]]))"
)
_STARTS = ("word", "(", "{")
_MIXED = ("number", "word", "{", "number", "}", "{", "number", "}")
# A number directly before would be a factor, and what follows could belong to the denominator only.
_ALONE, _WHOLE = r"(?<![0-9.^}\u0305\u0307])(?<![0-9)}]\s)", r"(?![0-9]|\s*[\^/⁄.(])"
_MIXED_NUMBER = re.compile(rf"{_ALONE}(?:([0-9]+)\s+)?([0-9]+)([/⁄])([0-9]+){_WHOLE}")
_VULGAR = re.compile(r"(?<![0-9.}])(?<![0-9)}]\s)([0-9]+)⁄([0-9]+)(?![0-9⁄])")
_REPEATING = re.compile(rf"{_ALONE}([0-9]+)\.([0-9]*)(?:\\overline\s?\{{([0-9]+)\}}|\(([0-9]+)\))")
_OVERLINED = re.compile("(?:[0-9]\u0305)+")
_DOTTED = re.compile(r"(?:\\dot\s?\{([0-9])\}|([0-9])\u0307)(?:([0-9]*)(?:\\dot\s?\{([0-9])\}|([0-9])\u0307))?")


class NotANumberError(ValueError):
    """The text is not an expression of this grammar."""


def parse_number(text: str) -> "Expr":
    """Return the value as a SymPy expression without symbols. Raise NotANumberError."""
    if len(text) > MAX_CHARS:
        raise NotANumberError(f"more than {MAX_CHARS} characters")
    bare = bare_number(text)
    if share := bare.endswith("%"):
        bare = bare[:-1]
        if re.search(r"(?<=[^eE])[-+]", bare):
            raise NotANumberError("a percentage of a part of a sum, or of all of it")
    value = _Parser(_with_braces(_with_fractions(_spelled(bare)).strip())).value()
    return value / 100 if share else value


def _spelled(text: str) -> str:
    for spelling, sign in _SPELLINGS.items():
        text = text.replace(spelling, sign)
    return text


def _with_fractions(text: str) -> str:
    r"""Write mixed numbers, ½ and repeating decimals as fractions in brackets: 1 1/4 is (5/4)."""
    text = text.replace("\\bar{", "\\overline{")
    text = _OVERLINED.sub(lambda found: f"\\overline{{{found[0].replace(chr(0x305), '')}}}", text)
    text = _DOTTED.sub(lambda found: f"\\overline{{{''.join(filter(None, found.groups()))}}}", text)
    text = _REPEATING.sub(_repeating, text)
    text = _MIXED_NUMBER.sub(_mixed, text)
    return _VULGAR.sub(r"(\1/\2)", text)


def _repeating(found: re.Match[str]) -> str:
    whole, start, period = found[1], found[2], found[3] or found[4]
    return f"(({int(whole + start + period) - int(whole + start)})/{10 ** len(start) * (10 ** len(period) - 1)})"


def _mixed(found: re.Match[str]) -> str:
    above, below = int(found[2]), int(found[4])
    if found[1] is None or above >= below:
        return found[0]
    return f"({int(found[1]) * below + above}/{below})"


def _with_braces(text: str) -> str:
    r"""Add the braces that LaTeX lets a one-digit argument omit: \frac12 is \frac{1}{2}."""
    start = 0
    while (start := text.find("\\frac", start)) >= 0:
        start = end = start + len("\\frac")
        for _ in range(2):
            head, argument = text[:end], text[end:].lstrip()
            if not argument.startswith("{"):
                argument = re.sub("^[0-9]", r"{\g<0>}", argument)
            text, end = head + argument, end + _length_in_braces(argument)
    return text


def _length_in_braces(text: str) -> int:
    """Return the length up to the brace that closes the first; 0 without an opening or closing brace."""
    depth = 0
    for place, sign in enumerate(text):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth <= 0:
            return place + 1 if sign == "}" and place else 0
    return 0


def _num_digits(base: "Expr") -> float:
    """Return the digits that a power of `base` gains per unit of its exponent; 0 for 1 and -1."""
    if base.is_Rational:
        return max(math.log10(abs(base.p)), math.log10(base.q))
    # At least one, because the power of a sum grows in terms.
    return max(1.0, abs(math.log10(float(abs(base)))))


class _Parser:
    """Recursive-descent parser over (kind, text) tokens; a sign is its own kind."""

    def __init__(self, text: str) -> None:
        import sympy

        self._sympy = sympy
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise NotANumberError(f"cannot read {text[position : position + 10]!r}")
            kind = str(match.lastgroup)
            self._tokens.append((match[kind] if kind == "sign" else kind, match[kind]))
            position = match.end()
        self._next = 0
        self._depth = 0

    def value(self) -> "Expr":
        value = self._sum()
        if self._next != len(self._tokens):
            raise NotANumberError("there is more than one expression")
        return value

    def _sum(self) -> "Expr":
        value = self._product()
        while (sign := self._take("+", "-")) is not None:
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self) -> "Expr":
        value = self._power()
        while True:
            if (sign := self._take("*", "/")) is not None:
                other = self._power()
                value = value * other if sign == "*" else value / other
            elif self._kind() in _STARTS:
                value = value * self._power()
            else:
                return value

    def _power(self, *, as_exponent: bool = False) -> "Expr":
        # The base may be a mixed number. An exponent is not: a fraction after it multiplies the whole power.
        if (sign := self._take("+", "-")) is not None:
            value = self._power(as_exponent=as_exponent)
            return value if sign == "+" else -value
        is_mixed = self._is_mixed() and not as_exponent
        base = self._operand() + self._operand() if is_mixed else self._operand()
        return self._raised(base, self._power(as_exponent=True)) if self._take("^") else base

    def _is_mixed(self) -> bool:
        r"""Return whether a whole number and a proper fraction follow: 1\frac{4}{5} is 9/5 and not a product."""
        ahead = self._tokens[self._next : self._next + len(_MIXED)]
        if tuple(kind for kind, _ in ahead) != _MIXED:
            return False
        whole, name, above, below = (ahead[place][1] for place in (0, 1, 3, 6))
        are_whole = "." not in whole and above.isdigit() and below.isdigit()
        return name.endswith("frac") and are_whole and int(above) < int(below)

    def _raised(self, base: "Expr", exponent: "Expr") -> "Expr":
        """Return base ** exponent, for a negative base and an odd root the real one. Raise OverflowError."""
        if exponent.is_finite and base.is_finite and base != 0:
            digits = abs(float(exponent)) * _num_digits(base)
            if digits > MAX_DIGITS:
                raise NotANumberError(f"a power of some {digits:.3g} digits; at most {MAX_DIGITS} are computed")
        if base.is_negative and exponent.is_Rational and exponent.q % 2 and exponent.q > 1:
            return (-1) ** exponent.p * (-base) ** exponent
        return base**exponent

    def _operand(self) -> "Expr":
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotANumberError(f"brackets nest deeper than {MAX_DEPTH}")
        kind, text = self._shift()
        if kind == "number":
            value = self._sympy.Rational(text)
        elif kind == "word":
            value = self._named(text.removeprefix("\\"))
        else:
            value = self._inside(kind)
        self._depth -= 1
        return value

    def _named(self, name: str) -> "Expr":
        if name == "pi":
            return self._sympy.pi
        if name == "frac":
            above = self._inside(self._shift()[0], only="{")
            return above / self._inside(self._shift()[0], only="{")
        order = self._inside("[") if self._take("[") else self._sympy.Integer(2)
        inside = self._operand()
        return self._raised(inside, 1 / order)

    def _inside(self, opening: str, only: str = "({[") -> "Expr":
        closing = {"(": ")", "{": "}", "[": "]"}.get(opening if opening in only else "")
        if closing is None:
            raise NotANumberError(f"expected a number, found {opening!r}")
        value = self._sum()
        if self._take(closing) is None:
            raise NotANumberError(f"{opening!r} is not closed")
        return value

    def _shift(self) -> tuple[str, str]:
        if self._next == len(self._tokens):
            raise NotANumberError("the expression ends early")
        self._next += 1
        return self._tokens[self._next - 1]

    def _take(self, *kinds: str) -> str | None:
        kind = self._kind()
        if kind not in kinds:
            return None
        self._next += 1
        return kind

    def _kind(self) -> str | None:
        return self._tokens[self._next][0] if self._next < len(self._tokens) else None


_ONE_AT_A_TIME = threading.Lock()


def score_math(text: str, gold: str) -> float:
    """Return 1.0 if both are the same number. Raise ScoringError if that cannot be decided in time."""
    if len(text) > MAX_CHARS:
        return 0.0
    # Most answers are plain numbers and do not need SymPy.
    answer, reference = read_number(text), read_number(gold)
    if answer is not None and reference is not None:
        return float(answer == reference)
    what = "the check of a number"
    with _ONE_AT_A_TIME:
        return float(scored(_checker, "", (text, gold), limit_s=LIMIT_S, what=what, memory=MAX_MEMORY) is True)


def _checker(_: str) -> tuple[Callable[[str, str], bool], type[bool]]:
    # Imported before the time starts, because the import takes longer than most checks.
    importlib.import_module("sympy")
    return same_number, bool


def same_number(text: str, gold: str) -> bool:
    """Compare two expressions; this may hang, so it runs in the checking process."""
    try:
        difference = parse_number(text) - parse_number(gold)
        return bool(difference == 0 or difference.equals(0))
    except (NotANumberError, ArithmeticError, TypeError, ValueError, RecursionError):
        return False


# No leading zeros, and ASCII digits only. A blank separates digits and never joins them.
_GAME24_TOKEN = re.compile(r" *([1-9][0-9]{0,3}|[-+*/()])")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def is_solution(text: str, numbers: Sequence[int], target: int = 24) -> bool:
    """Return whether the text uses each number exactly once and equals the target; it may end with `= 24`."""
    if len(text) > MAX_CHARS:
        return False
    formula = " ".join(_spelled(unwrapped(plain(text))).split())
    formula = re.sub(rf"= *{target}$", "", formula).rstrip(" ")
    tokens = _GAME24_TOKEN.findall(formula)
    depths = accumulate((token == "(") - (token == ")") for token in tokens)
    # Checked before anything is computed: few and small numbers bound the arithmetic.
    used = sorted(int(token) for token in tokens if token.isdigit())
    if _GAME24_TOKEN.sub("", formula) or used != sorted(numbers) or max(depths, default=0) > MAX_DEPTH:
        return False
    try:
        # Blanks keep two signs apart, so that no operator of Python appears that the rules do not know.
        return _game24_value(ast.parse(" ".join(tokens), mode="eval").body) == target
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False


def _game24_value(node: ast.expr) -> Fraction:
    """Return the value of + - * / on whole numbers. Raise ValueError for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            value: Fraction = _OPERATIONS[type(sign)](_game24_value(left), _game24_value(right))
            return value
    raise ValueError("only numbers, + - * / and brackets are allowed")
