"""EBNF of numbers within bounds."""

from collections.abc import Callable, Mapping
from decimal import Decimal
from math import ceil, floor

MAX_DIGITS = 40
"""Digits of an integer. A small model may never end a longer one."""
_MAX_DECIMAL_DIGITS = 14
"""Digits of a bounded number near its bounds: a reader's rounding of more digits could reach an excluded bound."""
Bounds = Mapping[str, int | float]
"""`minimum`, `maximum`, `exclusiveMinimum` and `exclusiveMaximum`."""


def integers(bounds: Bounds) -> str:
    """Return the expression of the integers within bounds; raises ValueError."""
    low = _tightest(bounds, max, minimum=ceil, exclusiveMinimum=lambda bound: floor(bound) + 1)
    high = _tightest(bounds, min, maximum=floor, exclusiveMaximum=lambda bound: ceil(bound) - 1)
    largest = 10**MAX_DIGITS - 1
    for name, bound in bounds.items():
        if abs(bound) > largest:
            raise ValueError(f"'{name}' has more than {MAX_DIGITS} digits")
    return _signed(-largest if low is None else low, largest if high is None else high, 0, bounds)


def decimals(bounds: Bounds) -> str:
    """Return the expression of the numbers within bounds, without exponents; raises ValueError."""
    exact = {name: Decimal(str(bound)) for name, bound in bounds.items()}
    places = _MAX_DECIMAL_DIGITS - max(len(str(abs(int(bound)))) for bound in exact.values())
    for name, bound in exact.items():
        if places < 1 or bound != round(bound, places):
            raise ValueError(f"'{name}' has more than {_MAX_DECIMAL_DIGITS} digits")
    # In units of the last place that is written, every bound is an integer.
    units = {name: int(bound.scaleb(places)) for name, bound in exact.items()}
    low = _tightest(units, max, minimum=int, exclusiveMinimum=lambda bound: int(bound) + 1)
    high = _tightest(units, min, maximum=int, exclusiveMaximum=lambda bound: int(bound) - 1)
    largest = 10 ** (MAX_DIGITS + places) - 1
    return _signed(-largest if low is None else low, largest if high is None else high, places, bounds)


def _tightest(bounds: Bounds, choose: Callable[[list[int]], int], **closed: Callable[[float], int]) -> int | None:
    """Return the tightest of these bounds as a closed one, or None if none of them is given."""
    given = [change(bounds[name]) for name, change in closed.items() if name in bounds]
    return choose(given) if given else None


def _signed(low: int, high: int, places: int, bounds: Bounds) -> str:
    if low > high:
        raise ValueError(f"no number is within {', '.join(f'{name!r} {bound}' for name, bound in bounds.items())}")
    parts = [f'"-" ({_positive(max(1, -high), -low, places)})'] if low < 0 else []
    parts += [_positive(max(0, low), high, places)] if high >= 0 else []
    parts += ['"-0"'] if low <= 0 <= high else []
    return f"({' | '.join(parts)})"


def _positive(low: int, high: int, places: int) -> str:
    """Return the numbers between two counts of units of the last of these decimal places."""
    unit = 10**places
    (first, low_part), (last, high_part) = divmod(low, unit), divmod(high, unit)
    if not places:
        return _whole(low, high)
    if first == last:
        return f'"{first}" {_fraction(low_part, high_part, places)}'
    parts = [f'"{first}" {_fraction(low_part, unit - 1, places)}', f'"{last}" {_fraction(0, high_part, places)}']
    if last - first > 1:
        parts.append(f'({_whole(first + 1, last - 1)}) ("." [0-9]{{1,{places}}})?')
    return " | ".join(parts)


def _fraction(low: int, high: int, places: int) -> str:
    digits = _digits(f"{low:0{places}}", f"{high:0{places}}", least=1)
    return f'("." {digits})?' if not low else f'"." {digits}'


def _whole(low: int, high: int) -> str:
    """Return the integers between two that are not negative."""
    parts = []
    while len(str(low)) < len(str(high)):
        end = 10 ** len(str(low)) - 1
        if low == 10 ** (len(str(low)) - 1) and low > 1:
            # All integers of these lengths.
            most = len(str(high)) - (high != 10 ** len(str(high)) - 1)
            parts.append(f"[1-9] [0-9]{{{len(str(low)) - 1},{most - 1}}}")
            low = 10**most
            continue
        parts.append(_digits(str(low), str(end)))
        low = end + 1
    return " | ".join([*parts, _digits(str(low), str(high))] if low <= high else parts)


def _digits(low: str, high: str, least: int | None = None) -> str:
    """Return the texts of digits between two of one length.

    With `least`, texts of at least so many digits count as if zeros followed.
    """
    num = len(low)
    if not num:
        return '""'
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{num if least is None else least},{num}}}"
    zeros, nines = "0" * (num - 1), "9" * (num - 1)
    if low[0] == high[0]:
        choices = [(low[0], low[0], low[1:], high[1:])]
    else:
        between = chr(ord(low[0]) + 1), chr(ord(high[0]) - 1)
        choices = [(low[0], low[0], low[1:], nines), (*between, zeros, nines), (high[0], high[0], zeros, high[1:])]
    rest = None if least is None else 0
    parts = [f"[{one}-{last}] {_digits(start, end, rest)}" for one, last, start, end in choices if one <= last]
    found = f"({' | '.join(parts)})"
    return f"{found}?" if least == 0 and set(low) == {"0"} else found
