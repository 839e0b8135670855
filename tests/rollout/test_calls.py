"""What of a sampled text is a function call, and that nothing of a text is lost."""

import json
from itertools import pairwise

import pytest
from endpoint_play import called
from hypothesis import given
from hypothesis import strategies as st

from rollout.endpoint.messages import ChatMessage, call_of, read_calls, turns_of

ONE, TWO = called('{"a": 1}'), called('{"a": 2}')


def written(value):
    return f"<tool_call>\n{value}\n</tool_call>"


def found(text, **more):
    message = read_calls(text, **more)
    return message and [(one.name, json.loads(one.arguments)) for one in message.calls]


@pytest.mark.parametrize(
    ("value", "arguments"),
    [
        *(('{"name": "add", "arguments": {"a": 1}}', {"a": 1}), ('{"name": "add", "parameters": {"a": 1}}', {"a": 1})),
        *(('{"name": "add", "input": {"a": 1}}', {"a": 1}), ('{"name": "add", "arguments": "{\\"a\\": 1}"}', {"a": 1})),
        *(('{"name": "add"}', {}), ('{"name": "add", "arguments": ""}', {}), ('{"name": "add", "input": " "}', {})),
        *(('{"name": "add", "arguments": null}', {}), ('{"arguments": {"</think>": "<think>"}, "name": "add"}', ...)),
        # Text, because an argument or a field would be lost.
        *(('{"name": "add", "arguments": {"a": 1}, "parameters": {"b": 2}}', None), ('{"name": "add", "a": 1}', None)),
        *(('{"name": "add", "arguments": {}, "id": "c"}', None), ('{"name": "add", "name": "sub"}', None)),
        *(('{"name": "add", "arguments": {"a": 1, "a": 2}}', None), ('{"function": {"name": "add"}}', None)),
        ('{"name": "add", "arguments": "{\\"a\\": 1, \\"a\\": 2}"}', None),
        # Text, because they are no object.
        *(('{"name": "add", }', None), ('{"name": "add", "arguments": [1]}', None), ('{"name": 1}', None)),
        *(('{"name": "add", "arguments": "1"}', None), ('{"name": "add", "arguments": "no"}', None)),
        # Text, because Python reads it as JSON and no client can.
        *(('{"name": "add", "arguments": {"a": "\\ud83d"}}', None), ('{"name": "a\\ud83d", "arguments": {}}', None)),
        *(('{"name": "add", "arguments": {"a": 1e999}}', None), ('{"name": "add", "input": "{\\"a\\": NaN}"}', None)),
    ],
)
def test_a_call_keeps_its_arguments_or_is_text(value, arguments):
    expected = {"</think>": "<think>"} if arguments is ... else arguments
    assert found(written(value)) == (None if arguments is None else [("add", expected)])
    assert found(f"{ONE}\n{written(value)}") == (None if arguments is None else [("add", {"a": 1}), ("add", expected)])


@pytest.mark.parametrize(
    ("text", "thinking", "calls"),
    [
        *((f"<think>{ONE}</think>{TWO}", False, [2]), (f"<think>{ONE}</think>No.", False, None)),
        *((f"{ONE}</think>No.", False, None), (f"{ONE}</think>{TWO}", False, [2]), (f"{ONE}</think>{TWO}", True, [2])),
        *((f"<think>{ONE}", False, None), (f"{ONE}<think>{TWO}", False, [1]), (ONE, True, None)),
        *((f"<think>a</think>{ONE}<think>{TWO}</think>", False, [1]), (f"[THINK]{ONE}[/THINK]{TWO}", False, [2])),
        *((f"<thinking>{ONE}</thinking>{TWO}", False, [2]), (f"<think>x</think>{ONE}", True, [1])),
        (f"<think>{written('{}')}</think>{ONE}", False, [1]),
        (f"{written('{}')}</think>{ONE}", False, [1]),
    ],
)
def test_thoughts_call_nothing(text, thinking, calls):
    assert found(text, thinking=thinking) == (calls and [("add", {"a": one}) for one in calls])


PARTS = ("<think>", "</think>", "[THINK]", "<tool_call>", "</tool_call>", ONE, TWO, written("{}"), "Hm. ", "\n", "{")


@given(st.lists(st.sampled_from(PARTS), max_size=9), st.booleans())
def test_words_and_calls_hold_every_letter_that_was_sampled(parts, thinking):
    text = "".join(parts)
    message = read_calls(text, thinking=thinking)
    if message:
        letters = message.content + "".join(called(one.arguments) for one in message.calls)
        assert sorted(letters.replace("\n", "").replace(" ", "")) == sorted(text.replace("\n", "").replace(" ", ""))


@pytest.mark.parametrize(
    ("given", "kept"), [("", "{}"), (None, "{}"), (" ", "{}"), ({"b": 1, "a": 2}, '{"a": 2, "b": 1}'), ("x", '"x"')]
)
def test_arguments_that_a_client_sends_are_canonical(given, kept):
    assert call_of("add", given).arguments == kept


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1))
def test_a_users_turns_never_follow_each_other_and_all_texts_stay_in_order(roles):
    turns = turns_of([ChatMessage(role=role, content=f"no. {number}.") for number, role in enumerate(roles)])
    assert all({one.role, other.role} != {"user"} for one, other in pairwise(turns))
    text = "".join(one.content for one in turns)
    places = [text.index(f"no. {number}.") for number in range(len(roles))]
    assert places == sorted(places)
