"""What the grammar of a JSON schema admits is valid, and what it cannot enforce is refused by name."""

import json
import os
import random
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.json_grammar import MAX_RULES, MAX_SCHEMA_CHARS, JsonGrammar

NUM_PAIRS = int(os.environ.get("SCHEMA_PAIRS", "150"))
A = {"type": "integer"}
OF_A = {"type": "object", "properties": {"a": A}, "required": ["a"], "additionalProperties": False}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}}}
NODE |= {"required": ["next"], "additionalProperties": False}
CAT, DOG = (
    {"type": "object", "properties": {"kind": {"const": kind}, kind: A}, "required": ["kind"]}
    for kind in ("cat", "dog")
)


def matcher(schema):
    from xgrammar import GrammarCompiler, GrammarMatcher, TokenizerInfo

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
    (
        {"oneOf": [CAT, DOG], "discriminator": {"propertyName": "kind"}},
        ['{"kind": "cat", "cat": 1}'],
        ['{"kind": "cow"}'],
    ),
    ({"type": ["string", "null"], "enum": ["a", 'q"\\\n', None, 3]}, ['"a"', '"q\\"\\\\\\n"', "null"], ["3", '"b"']),
    ({"type": "string", "minLength": 1, "maxLength": 2}, ['"a"', '"é\\n"', '"😀😀"'], ['""', '"abc"', '"\\u0041"']),
    ({"type": "integer", "minimum": -7.5, "exclusiveMaximum": 1e3}, ["-7", "0", "999"], ["-8", "1000", "007"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}, ["0.25", "0.001"], ["0", "0.0", "0.26", "1", "-1"]),
    ({"type": "number", "exclusiveMaximum": 1}, ["0.99", "-5.5"], ["1", "0.99999999999999999", "1.0"]),
    (
        {"type": "array", "prefixItems": [A, {"type": "string"}], "items": False, "minItems": 1},
        ["[1]", '[1, "a"]'],
        ["[]", '["a"]', '[1, "a", 2]'],
    ),
    ({"type": "array", "items": A, "minItems": 2, "maxItems": 3}, ["[1, 2]", "[1, 2, 3]"], ["[1]", "[1, 2, 3, 4]"]),
    (
        {"type": "object", "properties": {"ab": A, 'q"': A}, "additionalProperties": {"type": "string"}},
        ['{"ab": 1, "a": "x", "abc": "y"}', '{"b": "x"}', "{}"],
        ['{"ab": "x"}', '{"b": 1}', '{"ab": 1, "ab": "x"}'],
    ),
    (
        {"type": "object", "properties": {"a": A, "b": A, "c": A}, "required": ["b"]},
        ['{"b": 1}', '{"a": 1, "b": 1, "c": 1}', '{"b": 1, "c": 2}'],
        ["{}", '{"a": 1, "c": 1}', '{"b": 1, }'],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), ADMITTED)
def test_the_grammar_admits_what_the_schema_describes(schema, right, wrong):
    admits = matcher(schema)
    assert [text for text in right if not admits(text)] == []
    assert [text for text in wrong if admits(text)] == []
    for text in right:
        jsonschema.validate(json.loads(text), schema)


STRING, ARRAY, ANY_OBJECT = {"type": "string"}, {"type": "array"}, {"type": "object"}
REFUSED = [
    *(("pattern", STRING | {"pattern": pattern}) for pattern in ("^a$", "a|b", '"', "(?=a)", "\\\\")),
    *((name, STRING | {name: value}) for name, value in (("format", "date"), ("contentEncoding", "base64"))),
    *(
        (name, {"type": "array", name: value})
        for name, value in (("uniqueItems", True), ("contains", A), ("items", [A]))
    ),
    *((name, OF_A | {name: {"a": ["b"]}}) for name in ("dependentRequired", "dependentSchemas", "patternProperties")),
    *(
        (name, OF_A | {name: 1})
        for name in ("minProperties", "maxProperties", "propertyNames", "unevaluatedProperties")
    ),
    *((name, A | {name: A}) for name in ("not", "if", "then", "else", "$anchor", "$id", "multipleOf")),
    *(
        ("required", schema)
        for schema in (ANY_OBJECT | {"required": ["a"]}, OF_A | {"required": ["b"]}, {"required": ["a"]})
    ),
    *(("anyOf", schema) for schema in (OF_A | {"anyOf": [{"required": ["a"]}]}, {"anyOf": []}, {"anyOf": A})),
    *(("oneOf", {"oneOf": schemas}) for schemas in ([A, {"type": "number"}], [OF_A, OF_A], [{}, A], [CAT, OF_A])),
    ("allOf", {"allOf": [OF_A, CAT]}),
    *(("$ref", {"$ref": to}) for to in ("https://x.example/y.json", "y.json#/a", "#/$defs/B", "#", "#B")),
    ("$ref", {"$ref": "#/$defs/B", "minimum": 5, "$defs": {"B": A}}),
    ("$ref", {"$ref": "#/$defs/B", "$defs": {"B": {"anyOf": [A, {"$ref": "#/$defs/C"}]}, "C": {"$ref": "#/$defs/B"}}}),
    *(("minimum", A | {"minimum": bound}) for bound in ("5", True, 1e300)),
    ("exclusiveMinimum", A | {"minimum": 1, "exclusiveMinimum": True}),
    ("maximum", {"type": "number", "maximum": 0.1234567890123456}),
    ("minimum", A | {"minimum": 2, "maximum": 1}),
    *((name, STRING | {name: value}) for name, value in (("maxLength", 10**6), ("minLength", -1), ("enum", [1]))),
    ("minItems", ARRAY | {"minItems": 2, "items": False}),
    *(("type", {"type": value}) for value in ("strng", [], 5)),
    ("type", {"properties": {"a": A}}),
    *(("false", schema) for schema in (False, OF_A | {"properties": {"a": False}})),
    ("properties", {"type": "object", "properties": {f"p{number}": {} for number in range(MAX_RULES)}}),
    (str(MAX_SCHEMA_CHARS), {"enum": ["x" * MAX_SCHEMA_CHARS]}),
    ("JSON", {"const": float("inf")}),
]


@pytest.mark.parametrize(("name", "schema"), REFUSED)
def test_what_no_grammar_enforces_is_refused_by_name(name, schema):
    with pytest.raises(ValueError, match=re.escape(name)):
        JsonGrammar().value(schema)


@pytest.mark.parametrize("depth", [900, 3000])
def test_deep_schemas_are_refused(depth):
    deep = A
    for _ in range(depth):
        deep = {"type": "array", "items": deep}
    chain = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(depth)} | {f"d{depth}": A}
    for schema in (deep, {"$ref": "#/$defs/d0", "$defs": chain}):
        with pytest.raises(ValueError):
            JsonGrammar().value(schema)


# Properties

BOUNDS = st.one_of(st.integers(-1500, 1500), st.decimals(-20, 20, places=2).map(float))
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), BOUNDS),
)
COUNT = st.integers(0, 4)
TEXTS = st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": COUNT, "maxLength": COUNT})
CONSTANTS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(-9, 9), st.text(max_size=4), st.just({"a": [1]})
)
NAMES = st.one_of(st.sampled_from(["a", "ab", "abc", "", 'q"', "\\", "é", "-", "]"]), st.text(max_size=3))
ODD = st.sampled_from(
    [{"not": A}, {"pattern": "^a"}, {"uniqueItems": True}, {"format": "date"}, {"required": ["a"]}, {"enum": [1]}]
)


def larger(inner):
    lists = {
        "items": inner | st.booleans(),
        "prefixItems": st.lists(inner, max_size=2),
        "minItems": COUNT,
        "maxItems": COUNT,
    }
    objects = st.dictionaries(NAMES, inner, max_size=4).flatmap(
        lambda properties: st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.just(properties)},
            optional={
                "required": st.lists(st.sampled_from([*properties]), unique=True) if properties else st.just([]),
                "additionalProperties": inner | st.booleans(),
            },
        )
    )
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("array")}, optional=lists),
        objects,
        *(
            st.lists(inner, min_size=1, max_size=3).map(lambda parts, name=name: {name: parts})
            for name in ("anyOf", "oneOf", "allOf")
        ),
        st.tuples(inner, ODD).map(lambda pair: {**pair[0], **pair[1]}),
    )


LEAVES = st.one_of(
    NUMBERS,
    TEXTS,
    st.lists(CONSTANTS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    st.sampled_from([{}, {"type": ["null", "boolean"]}, {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b", "title": "b"}]),
)
SCHEMAS = st.tuples(*[st.recursive(LEAVES, larger, max_leaves=6)] * 3).map(
    lambda three: {**three[0], "$defs": {"a": three[1], "b": three[2]}}
)


def sampled(compiled, vocabulary, source):
    """Return a random text that the grammar admits, or None if it became long."""
    from xgrammar import GrammarMatcher, allocate_token_bitmask

    one, text = GrammarMatcher(compiled, terminate_without_stop_token=True), ""
    mask = allocate_token_bitmask(1, len(vocabulary))
    for _ in range(400):
        if one.is_completed() and (one.is_terminated() or source.random() < 0.5):
            return text
        one.fill_next_token_bitmask(mask)
        words = mask.numpy()[0]
        allowed = [token for token in range(1, len(vocabulary)) if words[token // 32] >> (token % 32) & 1]
        closing = [token for token in allowed if vocabulary[token] in '"]}']
        if not allowed:
            return text if one.is_completed() else None
        token = source.choice(closing if closing and source.random() < 0.4 else allowed)
        assert one.accept_token(token)
        text += vocabulary[token]
    return None


VOCABULARY = ["<eos>", *map(chr, range(32, 127)), "é", "😀", "\n", "\x01", "\x7f"]
COUNTS = {"replies": 0, "refused": 0, "unfinished": 0}


@settings(max_examples=NUM_PAIRS, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_text_that_the_grammar_admits_is_valid(schema, seed):
    from xgrammar import GrammarCompiler, TokenizerInfo

    grammar = JsonGrammar()
    try:
        text = grammar.text(grammar.value(schema))
    except ValueError:
        COUNTS["refused"] += 1
        return
    info = TokenizerInfo(VOCABULARY, stop_token_ids=[0])
    compiled = GrammarCompiler(info, cache_enabled=False, max_threads=1).compile_grammar(text)
    reply = sampled(compiled, VOCABULARY, random.Random(seed))
    COUNTS["unfinished" if reply is None else "replies"] += 1
    if reply is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(reply))
        reply.encode()
