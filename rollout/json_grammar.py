"""EBNF of the JSON values that a JSON schema describes.

A keyword is either enforced exactly or refused by name. An object has the listed properties in their order, and no
others; without `properties` it has any names.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import unquote

from configs.errors import MAX_JSON_DEPTH, check_depth, listed

LETTER = r'([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u00" [01] [0-9a-f]))'
"""One character of a JSON text. Other `\\u` escapes could write half a surrogate pair, or a known name differently."""
MAX_SCHEMA_CHARS = 50_000
MAX_RULES = 2000
MAX_COUNT = 1000
"""Limit of the bounds of a length. An engine's time per token grows with them."""
MAX_CHOICES = 64
MAX_DIGITS = 40
"""Digits of an integer. A small model may never end a longer one."""
MAX_BOUND = 1 << 53
"""Limit of the bounds of a number. A reader may round a number across a larger one."""

_ANNOTATIONS = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
_ANNOTATIONS |= {"$schema", "$comment", "$defs", "definitions", "discriminator", "nullable"}
"""Keywords that restrict nothing. `nullable` is of OpenAPI; a value that is not null satisfies both readings."""
_WHOLE = ("$ref", "allOf", "anyOf", "const", "enum")
"""Keywords that describe a value alone, except that `const` and `enum` may have a `type`."""
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_KEYWORDS: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "boolean": set(),
    "null": set(),
}
_CLASSES: dict[str, tuple[type, ...]] = {
    **{"object": (dict,), "array": (list,), "string": (str,), "boolean": (bool,), "null": (type(None),)},
    **{"integer": (int,), "number": (int, float)},
}

Fields = Mapping[str, object]


class JsonGrammar:
    """Rules for the values of schemas, which one grammar may combine.

    Args:
        letter: The expression of one character in a text.
        comma: What separates items and properties.
        colon: What separates a name from its value.
    """

    def __init__(self, *, letter: str = LETTER, comma: str = ", ", colon: str = ": ") -> None:
        self._letter = letter
        self._comma = quoted(comma)
        self._colon = colon
        self.rules: list[str] = []
        self._names: dict[object, str] = {}
        self._root: object = None
        self._num_roots = 0

    def text(self, root: str) -> str:
        """Return the whole grammar of an expression that `value` was part of."""
        return "\n".join((f"root ::= {root}", *self.rules))

    def arguments(self, schema: object) -> str:
        """Return the expression of the objects that a schema describes, where `type` may be missing.

        Raises ValueError that names what is not supported, or what may describe something else.
        """
        if not isinstance(schema, Mapping):
            raise ValueError(f"a schema of arguments is an object, not {json.dumps(schema)[:40]}")
        for name in (*_WHOLE, "type"):
            if name in schema and schema[name] != "object":
                raise ValueError(f"{name!r} may describe arguments that are no object")
        return self.value({**schema, "type": "object"})

    def value(self, schema: object) -> str:
        """Return the expression of a document's values; raises ValueError that names what is not supported."""
        try:
            check_depth(schema)
            size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
        except (RecursionError, ValueError):
            raise ValueError(f"the schema is no JSON of at most {MAX_JSON_DEPTH} levels") from None
        if size > MAX_SCHEMA_CHARS:
            raise ValueError(f"the schema has {size} bytes, more than {MAX_SCHEMA_CHARS}; shorten it")
        self._root = schema
        self._num_roots += 1
        try:
            return self._value(schema, frozenset())
        except RecursionError:
            raise ValueError("the schema or a chain of '$ref' is too deep") from None

    def new_rule(self, expression: str) -> str:
        return self._rule(object(), lambda: expression)

    def _rule(self, key: object, expression: Callable[[], str]) -> str:
        """Return the name of a rule, which is written when its key is new."""
        if key not in self._names:
            if len(self._names) == MAX_RULES:
                raise ValueError(f"the schemas need more than {MAX_RULES} rules; use fewer or shorter 'properties'")
            self._names[key] = f"v{len(self._names)}"
            self.rules.append(f"{self._names[key]} ::= {expression()}")
        return self._names[key]

    def _value(self, schema: object, through: frozenset[str] = frozenset()) -> str:
        """Return the expression of a schema. `through` holds the references that began at the same value."""
        given = {} if schema is True else schema
        if not isinstance(given, Mapping):
            shown = json.dumps(schema)[:40]
            raise ValueError(f"a schema, as in 'properties' or 'items', is an object or true, not {shown}")
        fields = {name: one for name, one in given.items() if name not in _ANNOTATIONS and not name.startswith("x-")}
        if not fields:
            return self._rule("any", lambda: self._typed({"type": [kind for kind in _KEYWORDS if kind != "integer"]}))
        whole = next((name for name in _WHOLE if name in fields), None)
        if whole is None:
            return self._typed(fields)
        for name in fields.keys() - {whole, "type" if whole in ("const", "enum") else whole}:
            raise ValueError(f"'{name[:80]}' beside '{whole}' is not supported")
        if whole == "$ref":
            return self._referred(fields["$ref"], through)
        choices = [fields["const"]] if whole == "const" else fields[whole]
        if not isinstance(choices, list) or not choices:
            raise ValueError(f"'{whole}' must be a list")
        if whole in ("const", "enum"):
            return _constants(choices, fields)
        most = 1 if whole == "allOf" else MAX_CHOICES
        if len(choices) > most:
            raise ValueError(f"'{whole}' has {len(choices)} schemas, more than {most}")
        return f"({' | '.join(self._value(one, through) for one in choices)})"

    def _referred(self, pointer: object, through: frozenset[str]) -> str:
        if not isinstance(pointer, str) or pointer in through:
            raise ValueError(f"'$ref' {json.dumps(pointer)[:80]} refers to itself")
        found = _target(pointer, self._root)
        return self._rule((self._num_roots, pointer), lambda: self._value(found, through | {pointer}))

    def _typed(self, fields: Fields) -> str:
        kinds = _types(fields)
        for name in fields.keys() - {"type"}.union(*(_KEYWORDS[kind] for kind in kinds)):
            raise ValueError(f"'{name[:80]}' is not supported for {', '.join(kinds)}")
        if "type" not in fields:
            raise ValueError(f"{listed(fields, 'and')} without a 'type' is not supported")
        choices = []
        for kind in kinds:
            given = {name: fields[name] for name in fields if name in _KEYWORDS[kind]}
            choices.append(self._rule(object() if given else kind, partial(self._of_type, kind, given)))
        return f"({' | '.join(choices)})"

    def _of_type(self, kind: str, fields: Fields) -> str:
        match kind:
            case "object":
                return rf'"{{" {self._object(fields)} "}}"'
            case "array":
                item = self._value(fields.get("items", True))
                return f'"[" {self._listed(item, *_counts(fields, "minItems", "maxItems"))} "]"'
            case "string":
                letter = self._rule("letter", lambda: self._letter)
                return rf'"\"" {_repeated(letter, *_counts(fields, "minLength", "maxLength"))} "\""'
            case "integer" | "number" if fields:
                return _numbers(kind, fields)
            case "integer":
                return f'"-"? ("0" | [1-9] [0-9]{{0,{MAX_DIGITS - 1}}})'
            case "number":
                return f'{self._typed({"type": "integer"})} ("." [0-9]{{1,20}})? ([eE] [+-]? [0-9]{{1,2}})?'
        return '"true" | "false"' if kind == "boolean" else '"null"'

    def _object(self, fields: Fields) -> str:
        properties, required = fields.get("properties", {}), fields.get("required", [])
        if not isinstance(properties, Mapping):
            raise ValueError("'properties' must be an object")
        if not isinstance(required, list) or not all(isinstance(one, str) and one in properties for one in required):
            raise ValueError("'required' must list names of 'properties'")
        others = fields.get("additionalProperties", "properties" not in fields)
        if others is False:
            return self._members(properties, required)
        if properties:
            raise ValueError("'additionalProperties' beside 'properties' can only be false")
        pair = f"{self._typed({'type': 'string'})} {quoted(self._colon)} {self._value(others)}"
        return self._listed(pair, 0, None)

    def _members(self, properties: Fields, required: list[str]) -> str:
        """Return the properties in their order, of which those that are not required may be missing."""
        tail, starts = "", list[str]()
        for name, schema in reversed(list(properties.items())):
            pair = self.new_rule(f"{_written(name, self._colon)} {self._value(schema)}")
            if name in required:
                starts = []
            starts.append(f"{pair} {tail}")
            follows = f"{self._comma} {pair}"
            tail = self.new_rule(f"{follows if name in required else f'({follows})?'} {tail}")
        return f"({' | '.join(reversed(starts))}){'' if required else '?'}" if starts else '""'

    def _listed(self, item: str, least: int, most: int | None) -> str:
        """Return the items of a list of bounded length."""
        if most == 0:
            return '""'
        rest = _repeated(f"({self._comma} {item})", max(0, least - 1), None if most is None else most - 1)
        return f"({item} {rest}){'' if least else '?'}"


def _target(pointer: str, root: object) -> object:
    """Return the part of a schema that a local `$ref` names; raises ValueError. Nothing is fetched."""
    path, found = pointer.removeprefix("#"), root
    try:
        if not pointer.startswith("#") or path[:1] not in ("", "/"):
            raise LookupError
        for part in unquote(path).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]  # type: ignore[index]
    except (LookupError, TypeError, ValueError):
        raise ValueError(f"'$ref' {pointer[:80]!r} is no part of this schema; only '#/...' is supported") from None
    return found


def quoted(text: str) -> str:
    """Return a terminal of EBNF, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _written(value: object, end: str = "") -> str:
    return quoted(json.dumps(value, ensure_ascii=False) + end)


def _repeated(expression: str, least: int, most: int | None) -> str:
    if (least, most) == (0, None):
        return f"{expression}*"
    return f"{expression}{{{least},{'' if most is None else most}}}"


def _types(fields: Fields) -> list[str]:
    given = fields.get("type", [*_KEYWORDS])
    kinds = given if isinstance(given, list) else [given]
    if not kinds or not all(isinstance(kind, str) and kind in _KEYWORDS for kind in kinds):
        raise ValueError(f"'type' must be one or several of {', '.join(_KEYWORDS)}")
    return list(map(str, kinds))


def _constants(values: list[object], fields: Fields) -> str:
    """Return those values of `const` or `enum` that have the schema's types; raises ValueError if there is none."""
    classes = {one for kind in _types(fields) for one in _CLASSES[kind]}
    found = [_written(value) for value in values if type(value) in classes]
    if not found:
        raise ValueError(f"'{'const' if 'const' in fields else 'enum'}' has no value of the schema's 'type'")
    return f"({' | '.join(found)})"


def _counts(fields: Fields, low: str, high: str) -> tuple[int, int | None]:
    least = _whole(fields, low, 0, 0, MAX_COUNT)
    most = _whole(fields, high, least, 0, MAX_COUNT)
    if most < least:
        raise ValueError(f"'{high}' is less than '{low}'")
    return least, most if high in fields else None


def _whole(fields: Fields, name: str, missing: int, least: int = -MAX_BOUND, most: int = MAX_BOUND) -> int:
    value = fields.get(name, missing)
    if not isinstance(value, int | float) or isinstance(value, bool) or value != int(value):
        raise ValueError(f"'{name}' must be a whole number")
    if name in fields and not least <= value <= most:
        raise ValueError(f"'{name}' must be from {least} to {most}")
    return int(value)


def _numbers(kind: str, fields: Fields) -> str:
    """Return the numbers within the bounds."""
    for name in fields:
        if kind == "number" and name.startswith("exclusive"):
            raise ValueError(f"'{name}' is not supported for number")
    end = 10**MAX_DIGITS
    low = max(_whole(fields, "minimum", 1 - end), _whole(fields, "exclusiveMinimum", -end) + 1)
    high = min(_whole(fields, "maximum", end - 1), _whole(fields, "exclusiveMaximum", end) - 1)
    if low > high:
        raise ValueError(f"no number has 'minimum' {low} and 'maximum' {high}")
    parts = [_range(max(0, low), high, kind)] if high >= 0 else []
    parts += [f'"-" ({_range(max(0, -high), -low, kind)})'] if low <= 0 else []
    return " | ".join(parts)


def _range(low: int, high: int, kind: str) -> str:
    """Return the numbers between two that are not negative, without exponents."""
    if kind == "number" and low < high:
        return f'({_range(low, high - 1, "integer")}) ("." [0-9]{{1,20}})? | "{high}"'
    first, last = len(str(low)), len(str(high))
    if first == last:
        return _digits(str(low), str(high))
    parts = [_digits(str(low), "9" * first), _digits(f"{10 ** (last - 1)}", str(high))]
    if last - first > 1:
        parts.append(f"[1-9] [0-9]{{{first},{last - 2}}}")
    return " | ".join(parts)


def _digits(low: str, high: str) -> str:
    """Return the texts of digits between two of one length."""
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    if (low[1:], high[1:]) == (zeros, nines):
        return f"[{low[0]}-{high[0]}] [0-9]{{{len(zeros)}}}"
    if low[0] == high[0]:
        return f'"{low[0]}" ({_digits(low[1:], high[1:])})'
    parts = [f'"{low[0]}" ({_digits(low[1:], nines)})', f'"{high[0]}" ({_digits(zeros, high[1:])})']
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}] [0-9]{{{len(zeros)}}}")
    return " | ".join(parts)
