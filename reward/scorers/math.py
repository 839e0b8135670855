"""Scorers of mathematical answers: math-verify's comparison, and the rules of Game of 24."""

import ast
import importlib
import logging
import operator
import re
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate

from reward.scorers.notation import bare_number, plain, read_number, unwrapped
from reward.scorers.process import ScoringError, scored
from reward.scorers.text import exact_match

MAX_CHARS = 200
MAX_DEPTH = 8
"""Nested brackets of an answer. The time to read one grows faster than their number."""
MAX_MEMORY = 2**30
"""Bytes of the checking process."""
LIMIT_S = 10.0
"""A check takes milliseconds, and longer where other processes use all cores."""

_SPELLINGS = {
    **dict.fromkeys(("×", "·", "∙", "⋅", "∗", "\\cdot", "\\times"), "*"),
    **dict.fromkeys(("÷", "∕", "\\div"), "/"),
    **dict.fromkeys(("\\!", "\\,", "\\;", "\\:", "\\ ", "~"), " "),
    **{"**": "^", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ "},
}
_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|ln|exp|sin|cos|tan)(?![A-Za-z])")
"""As Python and sympy print constants and functions."""
_FRACTION = re.compile(r"([0-9]+)⁄([0-9]+)|(?<=[0-9]) ([0-9]+)/([0-9]+)(?![0-9.])")
_ROOT = re.compile(r"(?:√|(?<![\\a-z])sqrt) ?(?:\(([^()]*)\)|([0-9]+))")
_REPEATING = re.compile(r"(?<![0-9.])([0-9]+)\.([0-9]*)\\(?:overline|bar) ?\{([0-9]+)\}")
_WORD = re.compile("[A-Za-z]{3,}")
_ONE_AT_A_TIME = threading.Lock()


def score_math(text: str, gold: str) -> float:
    """Return 1.0 if both are the same number, expression, equation, tuple, set, interval or matrix.

    Decimal numbers are compared exactly, words as words, and everything else by math-verify. A text whose check hangs
    is wrong; raises ScoringError if that of the reference hangs, too.
    """
    if len(text) > MAX_CHARS or _depth(text) > MAX_DEPTH:
        return 0.0
    answer, reference = read_number(text), read_number(gold)
    if answer is not None and reference is not None:
        return float(answer == reference)
    if text == gold or _WORD.fullmatch(unwrapped(plain(gold))):
        return exact_match(text, gold)
    try:
        return _checked(text, gold)
    except ScoringError:
        _checked(gold, gold)
        return 0.0


def _checked(text: str, gold: str) -> float:
    what = "the check of a mathematical answer"
    with _ONE_AT_A_TIME:
        return float(scored(_checker, "", (text, gold), limit_s=LIMIT_S, what=what, memory=MAX_MEMORY) is True)


def _checker(_: str) -> tuple[Callable[[str, str], bool], type[bool]]:
    # Imported before the time starts, because the import takes longer than most checks.
    importlib.import_module("math_verify")
    # It warns at each call that it has no limit of its own, which needs the main thread.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return same_value, bool


def same_value(text: str, gold: str) -> bool:
    """Return whether both are equal by math-verify, or the same text if it cannot read the reference.

    This may hang, so it runs in the checking process.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    wanted, found = (
        parse(f"${_latex(one)}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        for one in (gold, text)
    )
    return bool(verify(wanted, found, timeout_seconds=None)) if wanted else exact_match(text, gold) == 1.0


def _latex(text: str) -> str:
    """Return an answer as LaTeX without wrappers, with ½, 1 1/2 and repeating decimals as fractions."""
    bare = _NAMES.sub(r"\\\1 ", _spelled(bare_number(text)).replace("%", "\\%"))
    bare = _FRACTION.sub(lambda found: f"\\frac{{{found[1] or found[3]}}}{{{found[2] or found[4]}}}", bare)
    bare = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", bare)
    return _REPEATING.sub(_repeating, bare)


def _repeating(found: re.Match[str]) -> str:
    whole, start, period = found.groups()
    above, below = int(whole + start + period) - int(whole + start), 10 ** len(start) * (10 ** len(period) - 1)
    return f"\\frac{{{above}}}{{{below}}}"


def _spelled(text: str) -> str:
    rows = text.split("\\\\")  # a blank after the end of a row is no "\\ "
    for spelling, sign in _SPELLINGS.items():
        rows = [row.replace(spelling, sign) for row in rows]
    return "\\\\".join(rows)


def _depth(text: str) -> int:
    return max(accumulate((sign in "([{") - (sign in ")]}") for sign in text), default=0)


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
    # Checked before anything is computed: few and small numbers bound the arithmetic.
    used = sorted(int(token) for token in tokens if token.isdigit())
    if _GAME24_TOKEN.sub("", formula) or used != sorted(numbers) or _depth(formula) > MAX_DEPTH:
        return False
    try:
        # Blanks keep two signs apart, so that no operator of Python appears that the rules do not know.
        return arithmetic(" ".join(tokens)) == target
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False


def arithmetic(text: str) -> Fraction:
    """Return the value of + - * / on whole numbers. Raises SyntaxError, ValueError and ZeroDivisionError."""
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            value: Fraction = _OPERATIONS[type(sign)](_value(left), _value(right))
            return value
    raise ValueError("only numbers, + - * / and brackets are allowed")
