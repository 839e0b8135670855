"""Numeric answers of competition problems: equal values in any notation, decided by SymPy in a process of its own.

An expression that is no number, or that SymPy cannot decide in time, is not equal.
"""

import atexit
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from reward.checking_process import CheckingProcess, serve_checks
from reward.math_expression import MAX_CHARS, NotANumberError, parse_number, unwrapped

LIMIT_S = 5.0

# Starts its process with the first question that needs it.
_CHECKER = CheckingProcess("reward.math_answer", limit_s=LIMIT_S)
atexit.register(_CHECKER.close)

# Most answers are plain numbers, and need no SymPy.
_PLAIN = re.compile(r"[+-]?(?:[0-9]{1,30}|[0-9]{1,3}(?:,[0-9]{3}){1,8})(?:\.[0-9]{1,30})?(?:/[1-9][0-9]{0,30})?")


def score_math(text: str, gold: str) -> float:
    """1.0 where both are the same number. Raises CheckerError where the checking process cannot be started."""
    if len(text) > MAX_CHARS:
        return 0.0
    answer, reference = _plain(unwrapped(text)), _plain(unwrapped(gold))
    if answer is not None and reference is not None:
        return float(answer == reference)
    return float(_CHECKER.ask({"text": text, "gold": gold}) is True)


def same_number(question: Mapping[str, Any]) -> bool:
    """The check itself; may hang."""
    try:
        difference = parse_number(question["text"]) - parse_number(question["gold"])
        return bool(difference == 0 or difference.equals(0))
    except (NotANumberError, ArithmeticError, TypeError, ValueError, RecursionError):
        return False


def _plain(text: str) -> Fraction | None:
    if not _PLAIN.fullmatch(text):
        return None
    number, _, divisor = text.replace(",", "").partition("/")
    return Fraction(number) / int(divisor or 1)


def main() -> None:
    import sympy

    # Loaded before the first question: its import takes longer than most checks.
    sympy.Integer(0)
    serve_checks(same_number)


if __name__ == "__main__":
    main()
