"""EBNF of the JSON values that a JSON schema describes.

A keyword is either enforced exactly or refused by name. Objects have the order of their schema, and only the listed
properties unless `additionalProperties` allows others.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from urllib.parse import unquote

from configs.errors import MAX_JSON_DEPTH, check_depth, listed
from rollout.number_grammar import decimals, integers

LETTER = r'([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u00" [01] [0-9a-f]))'
"""One character of a JSON text. Other `\\u` escapes could write half a surrogate pair, or a known name differently."""
MAX_SCHEMA_CHARS = 50_000
MAX_RULES = 2000
MAX_COUNT = 1000
"""Limit of the bounds of a length. An engine's time per token grows with them."""

MAX_CHOICES = 64

_ANNOTATIONS = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
_ANNOTATIONS |= {"$schema", "$comment", "$defs", "definitions", "discriminator", "nullable"}
"""Keywords that restrict nothing. `nullable` is of OpenAPI; a value that is not null satisfies both readings."""
_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_KEYWORDS: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": set(),
    "null": set(),
}
_ANY = ("object", "array", "string", "number", "boolean", "null")
_WHOLE = ("$ref", "allOf", "anyOf", "oneOf", "const", "enum")
"""Keywords that describe a value alone; `type` may stand beside `const` and `enum`."""

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

    def text(self, root: str) -> str:
        """Return the whole grammar of an expression that `value` was part of."""
        return "\n".join((f"root ::= {root}", *self.rules))

    def arguments(self, schema: Fields) -> str:
        """Return the expression of the objects that a schema describes, where `type` may be missing.

        Raises ValueError that names what is not supported, or what may describe something else.
        """
        fields = _Document(self, schema).resolved(schema)
        other = [name for name in _WHOLE if name in fields] or ["type"] * (fields.get("type", "object") != "object")
        if other:
            raise ValueError(f"{other[0]!r} may describe arguments that are no object")
        return self.value(schema if "type" in fields else {**schema, "type": "object"})

    def value(self, schema: object) -> str:
        """Return the expression of a document's values; raises ValueError that names what is not supported."""
        try:
            check_depth(schema)
            size = len(json.dumps(schema, ensure_ascii=False, allow_nan=False).encode())
        except (RecursionError, ValueError):
            raise ValueError(f"the schema is no JSON of at most {MAX_JSON_DEPTH} levels") from None
        if size > MAX_SCHEMA_CHARS:
            raise ValueError(f"the schema has {size} bytes, more than {MAX_SCHEMA_CHARS}; shorten it")
        try:
            return _Document(self, schema).value(schema, frozenset())
        except RecursionError:
            raise ValueError("a chain of '$ref' is too long") from None

    def rule(self, key: object, expression: Callable[[], str]) -> str:
        """Return the name of a rule, which is written when its key is new."""
        if key not in self._names:
            if len(self._names) == MAX_RULES:
                raise ValueError(f"the schemas need more than {MAX_RULES} rules; use fewer or shorter 'properties'")
            self._names[key] = f"v{len(self._names)}"
            self.rules.append(f"{self._names[key]} ::= {expression()}")
        return self._names[key]

    def new_rule(self, expression: str) -> str:
        return self.rule(object(), lambda: expression)

    def any_value(self) -> str:
        return self.rule("any", lambda: " | ".join(self.plain(kind) for kind in _ANY))

    def plain(self, kind: str) -> str:
        """Return the expression of any value of a type."""
        match kind:
            case "object":
                return self.rule(kind, lambda: rf'"{{" {self.listed([], self.pair(self.any_value()), 0, None)} "}}"')
            case "array":
                return self.rule(kind, lambda: f'"[" {self.listed([], self.any_value(), 0, None)} "]"')
            case "string":
                return self.rule(kind, lambda: rf'"\"" {self._letter}* "\""')
            case "integer":
                return self.rule(kind, lambda: integers({}))
            case "number":
                return self.rule(
                    kind, lambda: f'{self.plain("integer")} ("." [0-9]{{1,20}})? ([eE] [+-]? [0-9]{{1,2}})?'
                )
        return '("true" | "false")' if kind == "boolean" else '"null"'

    def string(self, least: int, most: int | None) -> str:
        if not least and most is None:
            return self.plain("string")
        return rf'"\"" {_repeated(self.rule("letter", lambda: self._letter), least, most)} "\""'

    def listed(self, first: Sequence[str], item: str | None, least: int, most: int | None) -> str:
        """Return the items of a list: `first` in this order, then any number of `item`, between the bounds."""
        places = list(first)[:most]
        if not places and item is not None and most != 0:
            places = [item]
        rest = None if most is None else most - len(places)
        written = ""
        if item is not None and places:
            written = _repeated(f"({self._comma} {item})", max(0, least - len(places)), rest)
        for index, place in reversed(list(enumerate(places))):
            written = f"{f'{self._comma} ' if index else ''}{place} {written}"
            written = f"({written})?" if index >= least else written
        return written or '""'

    def pair(self, value: str, name: str | None = None, others: Sequence[str] = ()) -> str:
        """Return a property, with a fixed name or with any name except `others`."""
        if name is not None:
            return f"{quoted(json.dumps(name, ensure_ascii=False) + self._colon)} {value}"
        key = rf'"\"" {self._other_name([*others])} "\""' if others else self.plain("string")
        return f"{key} {quoted(self._colon)} {value}"

    def members(self, pairs: Sequence[tuple[str, bool]], extra: str | None) -> str:
        """Return the properties in order, of which some are required, and then any number of `extra`."""
        tail = f"({self._comma} {extra})*" if extra else ""
        starts = [f"{extra} {tail}"] if extra else []
        none_required = True
        for pair, is_required in reversed(pairs):
            if is_required:
                starts, none_required = [], False
            starts.append(f"{pair} {tail}")
            follows = f"{self._comma} {pair} {tail}" if is_required else f"({self._comma} {pair})? {tail}"
            tail = self.new_rule(follows)
        return f"({' | '.join(reversed(starts))}){'?' if none_required else ''}" if starts else '""'

    def _other_name(self, names: Sequence[str]) -> str:
        """Return the rest of a name that is none of `names`, in letters that need no escape."""
        heads = sorted({name[0] for name in names if name})
        plain = r"\"\\\x00-\x1f"
        options = [f"[^{plain}{''.join(map(_in_class, heads))}] [^{plain}]*"]
        for head in (head for head in heads if head not in '"\\' and head >= " "):
            rest = self._other_name([name[1:] for name in names if name[:1] == head])
            options.append(f"{quoted(head)} {rest}")
        return self.new_rule(" | ".join(options)) if "" in names else f"({self.new_rule(' | '.join(options))})?"


class _Document:
    """The schema that `$ref` refers to."""

    def __init__(self, grammar: JsonGrammar, root: object) -> None:
        self._grammar = grammar
        self._root = root

    def value(self, schema: object, through: frozenset[str]) -> str:
        """Return the expression of a schema. `through` holds the references that began at the same value."""
        if schema is True:
            return self._grammar.any_value()
        if not isinstance(schema, Mapping):
            raise ValueError(f"a schema must be an object or true, not {json.dumps(schema)[:40]}")
        fields = asserted(schema)
        if not fields:
            return self._grammar.any_value()
        whole = next((name for name in _WHOLE if name in fields), None)
        if whole is None:
            return self._typed(fields)
        for name in fields.keys() - {whole, "type" if whole in ("const", "enum") else whole}:
            raise ValueError(f"'{name}' beside '{whole}' is not supported")
        given = fields[whole]
        if whole in ("const", "enum"):
            return _literal(_values(fields))
        if whole == "$ref":
            return self._referred(given, through)
        if not isinstance(given, list) or not given or (whole == "allOf" and len(given) > 1):
            raise ValueError(f"'{whole}' must be a list of {'one schema' if whole == 'allOf' else 'schemas'}")
        if len(given) > MAX_CHOICES:
            raise ValueError(f"'{whole}' has {len(given)} schemas, more than {MAX_CHOICES}")
        if whole == "oneOf" and not all(self._disjoint(*pair) for pair in combinations(given, 2)):
            raise ValueError("'oneOf' is supported only for schemas that exclude each other by type or by a constant")
        return f"({' | '.join(self.value(one, through) for one in given)})"

    def _referred(self, pointer: object, through: frozenset[str]) -> str:
        if not isinstance(pointer, str) or pointer in through:
            raise ValueError(f"'$ref' {json.dumps(pointer)[:80]} refers to itself")
        target = self._target(pointer)
        return self._grammar.rule((self, pointer), lambda: self.value(target, through | {pointer}))

    def _target(self, pointer: str) -> object:
        place, found = pointer.removeprefix("#"), self._root
        try:
            if not pointer.startswith("#") or place[:1] not in ("", "/"):
                raise KeyError(pointer)
            for part in unquote(place).split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                found = found[int(name)] if isinstance(found, list) else found[name]  # type: ignore[index]
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"'$ref' {pointer[:80]!r} is no part of this schema; only '#/...' is supported") from None
        return found

    def _typed(self, fields: Fields) -> str:
        kinds = _types(fields)
        known = {"type"}.union(*(_KEYWORDS[kind] for kind in kinds))
        for name in fields:
            if name not in known:
                raise ValueError(f"'{name[:80]}' is not supported for {' and '.join(kinds)}")
        if "type" not in fields:
            raise ValueError(f"{listed(fields, 'and')} needs a 'type' beside it")
        return f"({' | '.join(self._of_type(kind, fields) for kind in kinds)})"

    def _of_type(self, kind: str, fields: Fields) -> str:
        match kind:
            case "object" if fields.keys() & _KEYWORDS[kind]:
                return self._object(fields)
            case "array" if fields.keys() & _KEYWORDS[kind]:
                return self._array(fields)
            case "string":
                return self._grammar.string(*_counts(fields, "minLength", "maxLength"))
            case "integer" | "number" if bounds := {
                name: _bound(fields, name) for name in sorted(_NUMBER & fields.keys())
            }:
                return integers(bounds) if kind == "integer" else decimals(bounds)
        return self._grammar.plain(kind)

    def _object(self, fields: Fields) -> str:
        properties, required = _properties(fields), _required(fields)
        more = fields.get("additionalProperties", "properties" not in fields)
        extra = None
        if more is not False:
            extra = self._grammar.pair(self._member(more), others=list(properties))
        pairs = [
            (self._grammar.new_rule(self._grammar.pair(self._member(one), name)), name in required)
            for name, one in properties.items()
        ]
        return self._grammar.new_rule(rf'"{{" {self._grammar.members(pairs, extra)} "}}"')

    def _array(self, fields: Fields) -> str:
        first, items = fields.get("prefixItems", []), fields.get("items", True)
        if not isinstance(first, list):
            raise ValueError("'prefixItems' must be a list")
        least, most = _counts(fields, "minItems", "maxItems")
        if items is False:
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            raise ValueError(f"'minItems' {least} leaves no array of at most {most} items")
        item = None if items is False else self._member(items)
        written = self._grammar.listed([self._member(one) for one in first], item, least, most)
        return self._grammar.new_rule(f'"[" {written} "]"')

    def _member(self, schema: object) -> str:
        return self._grammar.new_rule(self.value(schema, frozenset()))

    def _disjoint(self, one: object, other: object) -> bool:
        """Return whether no value satisfies both schemas, as far as types and constants show."""
        one, other = self.resolved(one), self.resolved(other)
        if not one or not other:
            return False
        if constants := [_values(part) for part in (one, other) if part.keys() & {"const", "enum"}]:
            texts = [{value for value in values if isinstance(value, str)} for values in constants]
            return len(constants) == 2 and sum(map(len, constants)) == len(set().union(*texts))
        if "type" not in one or "type" not in other:
            return False
        kinds, others = set(_types(one)), set(_types(other))
        if not kinds & others and not {"integer", "number"} <= kinds | others:
            return True
        if kinds != {"object"} or others != {"object"}:
            return False
        return any(
            {"const", "enum"} & self._tag(one, name).keys()
            and {"const", "enum"} & self._tag(other, name).keys()
            and self._disjoint(self._tag(one, name), self._tag(other, name))
            for name in set(_required(one)) & set(_required(other))
        )

    def _tag(self, schema: Fields, name: str) -> Fields:
        return self.resolved(_properties(schema)[name])

    def resolved(self, schema: object) -> Fields:
        """Return what a schema asserts itself, or nothing if it only refers in a circle."""
        for _ in range(MAX_JSON_DEPTH):
            fields = asserted(schema) if isinstance(schema, Mapping) else {}
            if set(fields) != {"$ref"}:
                return fields
            schema = self._target(str(fields["$ref"]))
        return {}


def asserted(schema: Fields) -> dict[str, object]:
    """Return the keywords of a schema that restrict its values."""
    return {name: value for name, value in schema.items() if name not in _ANNOTATIONS and not name.startswith("x-")}


def _properties(fields: Fields) -> Fields:
    properties = fields.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError("'properties' must be an object")
    return properties


def _required(fields: Fields) -> list[str]:
    required = fields.get("required", [])
    if not isinstance(required, list) or not all(
        isinstance(name, str) and name in _properties(fields) for name in required
    ):
        raise ValueError("'required' must list names of 'properties'")
    return required


def quoted(text: str) -> str:
    """Return a terminal of EBNF, which has the escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _repeated(expression: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    if (least, most) == (0, None):
        return f"{expression}*"
    return f"{expression}{{{least},{'' if most is None else most}}}"


def _in_class(letter: str) -> str:
    return f"\\U{ord(letter):08x}"


def _written(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _literal(values: Sequence[object]) -> str:
    return f"({' | '.join(quoted(_written(value)) for value in values)})"


def _values(fields: Fields) -> list[object]:
    """Return the values of `const` or `enum` that have the schema's types; raises ValueError if there is none."""
    values = [fields["const"]] if "const" in fields else fields["enum"]
    kinds = _types(fields)
    if not isinstance(values, list) or not (found := [value for value in values if _type_of(value) & set(kinds)]):
        raise ValueError(f"'{'const' if 'const' in fields else 'enum'}' must list values of the schema's type")
    return found


def _type_of(value: object) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    names = {str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _types(fields: Fields) -> list[str]:
    given = fields.get("type", list(_ANY))
    kinds = given if isinstance(given, list) else [given]
    if not kinds or not all(isinstance(kind, str) and kind in _KEYWORDS for kind in kinds):
        raise ValueError(f"'type' must be one or several of {', '.join(_KEYWORDS)}")
    return list(map(str, kinds))


def _counts(fields: Fields, low: str, high: str) -> tuple[int, int | None]:
    for name in (low, high):
        count = fields.get(name, 0)
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_COUNT:
            raise ValueError(f"'{name}' must be a whole number from 0 to {MAX_COUNT}")
    least, most = int(str(fields.get(low, 0))), fields.get(high)
    if isinstance(most, int) and most < least:
        raise ValueError(f"'{high}' is less than '{low}'")
    return least, most if isinstance(most, int) else None


def _bound(fields: Fields, name: str) -> int | float:
    value = fields[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"'{name}' must be a number")
    return value
