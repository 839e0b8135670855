"""The notation that all scorers share: signs of other scripts, wrappers around an answer, and plain numbers."""

import re
import unicodedata
from fractions import Fraction

_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎]+")
_SLANTED = re.compile(r"\^\{([0-9]+)\}⁄_\{([0-9]+)\}")
_SAME_SIGN = ("<wide>", "<narrow>", "<small>", "<font>")
_SIGNS = {
    **dict.fromkeys("‘’‚′", "'"),
    **dict.fromkeys("“”„″", '"'),
    **{"−": "-", "٫": ".", "٬": ",", "٪": "%"},
}

_WRAPPERS = tuple(
    re.compile(wrapper, re.DOTALL)
    for wrapper in (
        *(r"\$\$(.*)\$\$", r"\$(.*)(?<!\\)\$", r"\\\[(.*)\\\]", r"\\\((.*)\\\)"),
        r"\\(?:boxed|text|textbf|textit|mathrm|mathbf|mathit|mbox)\s?\{(.*)\}",
        *(r"\*\*((?:(?!\*\*).)+)\*\*", r"\*([^*]+)\*", r"__((?:(?!__).)+)__", r"_([^_]+)_", r"`([^`]+)`"),
    )
)
_DELIMITER = re.compile(r"(?<!\\)\$|\\[()\[\]]")
_FULL_STOP = re.compile(r"(?<=[0-9)}\]%$*_`])[.。।]$")
_CURRENCY = re.compile(r"^([+-]?)\s*\\?\$\s*(?=[-+]?\.?[0-9])")
# The digits before a decimal comma may be a zero, those before thousands may not.
_GROUPED = re.compile(
    r"(?<![0-9.,}])[1-9][0-9]{0,2}(?P<comma>,|\{,\}|\\[,;: ]|~|[\u00a0\u2009\u202f])[0-9]{3}"
    r"(?:(?P=comma)[0-9]{3})*(?![0-9]|,[0-9])"
)
_NUMBER = re.compile(r"([+-]?(?:[0-9]{1,60}(?:\.[0-9]{1,60})?|\.[0-9]{1,60})(?:[eE][+-]?[0-9]{1,3})?)(?: *(%))?")


def plain(text: str) -> str:
    """Return text with ASCII digits and signs for those of other scripts and widths; ½ is a 1⁄2 after a blank."""
    typed = _INVISIBLE.sub("", unicodedata.normalize("NFC", text))
    typed = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", typed)
    typed = _LOWERED.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}", typed)
    return _SLANTED.sub(r" \1⁄\2", "".join(map(_plain_sign, typed)))


def _plain_sign(sign: str) -> str:
    if sign.isascii():
        return sign
    if sign in _SIGNS:
        return _SIGNS[sign]
    if (digit := unicodedata.decimal(sign, None)) is not None:
        return str(digit)
    if unicodedata.category(sign) == "Pd":
        return "-"
    kind = unicodedata.decomposition(sign).partition(" ")[0]
    if kind == "<fraction>":
        return " " + unicodedata.normalize("NFKC", sign)
    return "".join(map(_plain_sign, unicodedata.normalize("NFKC", sign))) if kind in _SAME_SIGN else sign


def unwrapped(text: str) -> str:
    r"""Remove white space, $...$, \(...\), \[...\], \boxed{...}, \text{...} and Markdown around the whole text."""
    bare, before = text.strip(), None
    while bare != before:
        before = bare
        for wrapper in _WRAPPERS:
            if (match := wrapper.fullmatch(bare)) and _closes_last(match[1]):
                bare = match[1].strip()
    return bare


def _closes_last(inside: str) -> bool:
    r"""Return whether no brace inside closes the wrapper early: \boxed{1}\boxed{2} is two answers."""
    depth = 0
    for sign in inside:
        depth += {"{": 1, "}": -1}.get(sign, 0)
        if depth < 0:
            return False
    return depth == 0 and not _DELIMITER.search(inside)


def ungrouped(text: str) -> str:
    r"""Remove the separators of thousands: a comma, {,}, \, and narrow or hard blanks. A list 1,2,300 has none."""
    return _GROUPED.sub(lambda found: re.sub("[^0-9]", "", found[0]), text)


def bare_number(text: str) -> str:
    """Return the text of a number without wrappers, final full stop, dollar sign and separators of thousands."""
    bare = unwrapped(_FULL_STOP.sub("", unwrapped(plain(text)))).replace("\\%", "%")
    return ungrouped(_CURRENCY.sub(r"\1", bare))


def read_number(text: str) -> Fraction | None:
    """Return the value of a decimal number or percentage, or None for anything else."""
    if (match := _NUMBER.fullmatch(bare_number(text))) is None:
        return None
    return Fraction(match[1]) / (100 if match[2] else 1)
