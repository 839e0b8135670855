"""What the grammar of a JSON schema admits is valid, and what it cannot enforce is refused by name."""

import json
import random
import re
from typing import Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field, PositiveInt
from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo, allocate_token_bitmask

from rollout.json_grammar import MAX_BOUND, MAX_RULES, MAX_SCHEMA_CHARS, JsonGrammar

A, TEXT, LIST = {"type": "integer"}, {"type": "string"}, {"type": "array"}
OF_A = {"type": "object", "properties": {"a": A}, "required": ["a"], "additionalProperties": False}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
NODE |= {"required": ["next"], "additionalProperties": False}


def matcher(schema):
    grammar = JsonGrammar()
    compiled = GrammarCompiler(TokenizerInfo([])).compile_grammar(grammar.text(grammar.value(schema)))
    return lambda text: bool((one := GrammarMatcher(compiled)).accept_string(text) and one.is_completed())


ADMITTED = [
    (True, ['{"a": [1, {"b": null}]}', "1e5", '""'], ["nul", '"\\ud800"']),
    ({"type": "object"}, ['{"a": [1]}', "{}"], ["[]", '{"a":1}']),
    (OF_A, ['{"a": 4111111111111111222}', '{"a": -0}'], ["{}", '{"a": 1.5}', '{"a": 1, "a": 2}', '{"a": 1, "b": 2}']),
    (
        {"allOf": [{"$ref": "#/$defs/N"}], "$defs": {"N": NODE}, "title": "T"},
        ['{"next": {"next": null}}'],
        ['{"next": 1}'],
    ),
    ({"type": ["string", "null"], "enum": ["a", 'q"\\\n', None, 3]}, ['"a"', '"q\\"\\\\\\n"', "null"], ["3", '"b"']),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', '"é\\n"', '"😀😀"'], ['""', '"abc"', '"\\u0041"']),
    ({"type": "number", "minimum": 0, "maximum": 1e0}, ["0.25", "1", "0", "-0"], ["1.01", "-0.5", "2", "1e5", "00"]),
    ({"type": "array", "items": A, "minItems": 2, "maxItems": 3}, ["[1, 2]", "[1, 2, 3]"], ["[1]", "[1, 2, 3, 4]"]),
    ({"type": "object", "additionalProperties": A}, ['{"a": 1, "b": 2}', "{}"], ['{"a": "x"}']),
    (
        {"type": "object", "properties": {"a": A, "b": A, "c": A}, "required": ["b"]},
        ['{"b": 1}', '{"a": 1, "b": 1, "c": 1}', '{"b": 1, "c": 2}'],
        ["{}", '{"a": 1, "c": 1}', '{"b": 1, }', '{"b": 1, "d": 1}'],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), ADMITTED)
def test_the_grammar_admits_what_the_schema_describes(schema, right, wrong):
    admits = matcher(schema)
    assert [text for text in right if not admits(text)] == []
    assert [text for text in wrong if admits(text)] == []
    for text in right:
        jsonschema.validate(json.loads(text), schema)


class Node(BaseModel):
    """A node of a tree."""

    kind: Literal["a", "b"]
    size: PositiveInt = 1
    share: float | None = Field(None, ge=0, le=1, description="of the parent")
    names: list[str] = Field(max_length=2)
    nodes: "list[Node]" = []


class Tree(BaseModel):
    root: Node
    by_name: dict[str, int]


@pytest.mark.parametrize("schema", [Tree.model_json_schema(), to_strict_json_schema(Tree)])
def test_the_schemas_of_models_are_enforced(schema):
    node = '{"kind": "a", "size": 3, "share": 0.5, "names": ["x"], "nodes": [%s]}'
    tree = '{"root": %s, "by_name": {"n": 1}}'
    admits = matcher(schema)
    assert admits(tree % (node % (node % "")))
    assert not admits(tree % (node % "1"))


BOUND = st.integers(-30, 30) | st.integers(-MAX_BOUND, MAX_BOUND)
BOUNDS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), BOUND)
)


@settings(max_examples=60, deadline=None)
@given(BOUNDS, st.lists(st.integers(-(10**40) + 1, 10**40 - 1) | st.integers(-40, 40), min_size=20))
def test_exactly_the_integers_within_the_bounds_are_admitted(bounds, others):
    schema = A | bounds
    near = [bound + more for bound in bounds.values() for more in range(-2, 3)]
    valid = {number: jsonschema.Draft202012Validator(schema).is_valid(number) for number in (*near, *others)}
    try:
        admits = matcher(schema)
    except ValueError:
        assert not any(valid.values())
    else:
        assert {number: admits(str(number)) for number in valid} == valid


CIRCLE = {"B": {"anyOf": [A, {"$ref": "#/$defs/C"}]}, "C": {"$ref": "#/$defs/B"}}
KEYWORDS = [
    (TEXT, {"pattern": ["^a$"], "format": ["date"], "maxLength": [10**6], "minLength": [-1, True], "enum": [[1], []]}),
    (LIST, {"uniqueItems": [True], "contains": [A], "items": [[A], False], "prefixItems": [[A]], "minItems": [0.5]}),
    (
        OF_A,
        {"patternProperties": [{}], "additionalProperties": [True, TEXT], "required": [["b"]], "minProperties": [1]},
    ),
    (OF_A, {"dependentRequired": [{"a": []}], "anyOf": [[{"required": ["a"]}]], "properties": [{"a": False}, []]}),
    (A, {"minimum": ["5", True, 1e300, 0.5, MAX_BOUND + 1], "exclusiveMinimum": [True], "not": [A], "if": [A]}),
    (A, {"multipleOf": [2], "oneOf": [[A]], "$anchor": ["a"], "$id": ["a"], "type": ["strng", [], 5]}),
    (A | {"minimum": 1}, {"maximum": [0]}),
    ({"type": ["integer", "number"]}, {"exclusiveMinimum": [1]}),
    ({"type": "object"}, {"required": [["a"]]}),
    ({}, {"anyOf": [[], A], "allOf": [[OF_A, A]], "oneOf": [[A]], "required": [["a"]], "minimum": [1]}),
    ({}, {"$ref": ["https://x.example/y.json", "y.json#/a", "#/$defs/B", "#", "#B", 5]}),
    ({"$defs": CIRCLE}, {"$ref": ["#/$defs/B"]}),
    ({"$defs": {"B": A}, "minimum": 5}, {"$ref": ["#/$defs/B"]}),
    ({"type": "object"}, {"properties": [{f"p{number}": {} for number in range(MAX_RULES)}]}),
]
REFUSED = [
    *((name, base | {name: value}) for base, given in KEYWORDS for name in given for value in given[name]),
    *(("false", False), (str(MAX_SCHEMA_CHARS), {"enum": ["x" * MAX_SCHEMA_CHARS]})),
    *(("JSON", {"const": value}) for value in (float("inf"), "\ud800")),
]


@pytest.mark.parametrize(("name", "schema"), REFUSED)
def test_what_no_grammar_enforces_is_refused_by_name(name, schema):
    with pytest.raises(ValueError, match=re.escape(name)):
        JsonGrammar().value(schema)


def test_deep_schemas_are_refused():
    deep, depth = A, 900
    for _ in range(depth):
        deep = {"type": "array", "items": deep}
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(depth)} | {f"d{depth}": A}
    for schema in (deep, {"$ref": "#/$defs/d0", "$defs": chain}):
        with pytest.raises(ValueError):
            JsonGrammar().value(schema)


def test_references_of_combined_schemas_are_their_own():
    grammar = JsonGrammar()
    number, text = (grammar.value({"$ref": "#/$defs/a", "$defs": {"a": one}}) for one in (A, TEXT))
    assert number != text


@pytest.mark.parametrize(
    ("name", "schema"),
    [("list", ["list"]), *((name, {name: ["string"]}) for name in ("$ref", "anyOf", "enum", "type"))],
)
def test_arguments_are_an_object(name, schema):
    with pytest.raises(ValueError, match=re.escape(name)):
        JsonGrammar().arguments(schema)


COUNT = st.integers(0, 4)
NUMBERS = st.tuples(st.sampled_from(["integer", "number"]), BOUNDS).map(lambda pair: {"type": pair[0], **pair[1]})
TEXTS = st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": COUNT, "maxLength": COUNT})
CONSTANTS = st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | st.text(max_size=4) | st.just({"a": [1]})
NAMES = st.sampled_from(["a", "ab", "", 'q"', "\\", "é", "]"]) | st.text(max_size=3)
ODD = st.sampled_from([{"not": A}, {"pattern": "^a"}, {"uniqueItems": True}, {"required": ["a"]}, {"enum": [1]}])
OTHERS = st.sampled_from([{"type": ["null", "boolean"]}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b", "title": "b"}])
LEAVES = NUMBERS | TEXTS | OTHERS | st.lists(CONSTANTS, min_size=1, max_size=3).map(lambda values: {"enum": values})


def object_of(given):
    required = [name for name, (_, is_required) in given.items() if is_required]
    return {"type": "object", "properties": {name: one for name, (one, _) in given.items()}, "required": required}


def larger(inner):
    several = st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1, max_size=3))
    fields = {"items": inner, "minItems": COUNT, "maxItems": COUNT, "additionalProperties": inner}
    return st.one_of(
        st.fixed_dictionaries({"type": st.just(["array", "object"])}, optional=fields),
        *[st.dictionaries(NAMES, st.tuples(inner, st.booleans()), min_size=1, max_size=3).map(object_of)] * 2,
        several.map(lambda pair: dict([pair])),
        st.tuples(inner, ODD).map(lambda pair: {**pair[0], **pair[1]}),
    )


SCHEMAS = st.tuples(*[st.recursive(LEAVES, larger, max_leaves=6)] * 3).map(
    lambda three: {**three[0], "$defs": {"a": three[1], "b": three[2]}}
)
VOCABULARY = ["<eos>", *map(chr, range(32, 127)), "é", "😀", "\n", "\x01", "\x7f"]


def sampled(grammar, source):
    """Return a random text that the grammar admits, or None if it became long."""
    info = TokenizerInfo(VOCABULARY, stop_token_ids=[0])
    compiled = GrammarCompiler(info, cache_enabled=False, max_threads=1).compile_grammar(grammar)
    one, text = GrammarMatcher(compiled, terminate_without_stop_token=True), ""
    mask = allocate_token_bitmask(1, len(VOCABULARY))
    for _ in range(400):
        if one.is_completed() and (one.is_terminated() or source.random() < 0.5):
            return text
        one.fill_next_token_bitmask(mask)
        words = mask.numpy()[0]
        allowed = [token for token in range(1, len(VOCABULARY)) if words[token // 32] >> (token % 32) & 1]
        closing = [token for token in allowed if VOCABULARY[token] in '"]}']
        if not allowed:
            return text if one.is_completed() else None
        token = source.choice(closing if closing and source.random() < 0.4 else allowed)
        assert one.accept_token(token)
        text += VOCABULARY[token]
    return None


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_text_that_the_grammar_admits_is_valid(schema, seed):
    grammar = JsonGrammar()
    try:
        text = grammar.text(grammar.value(schema))
    except ValueError:
        return
    reply = sampled(text, random.Random(seed))
    if reply is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(reply))
        reply.encode()
