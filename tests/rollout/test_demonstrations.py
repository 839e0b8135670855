"""Demonstrations of an agent of one's own: what a teacher or a file says becomes what the policy would have sampled."""

import dataclasses
import json

import pytest
from endpoint_play import ADD, RULES, called, user
from scripted import ScriptedTokenizer, make_task, text_of

from configs.errors import UserError
from configs.learner import TeacherConfig
from configs.plugins import OwnCodeError
from rollout.agent.demonstrations import load_teacher, read_conversations, recorded_trajectory
from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt
from rollout.endpoint.chat_completions import read
from rollout.endpoint.messages import RequestError
from rollout.endpoint.writer import TeacherWriter
from tests.changed import replace

CHAT = ChatFormat(ScriptedTokenizer())
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def asked(*messages, **more):
    attempt = Attempt(TeacherWriter(None, "nobody", make_task(), CHAT), CHAT, RULES)
    return read({"model": "policy", "messages": list(messages), **more}, attempt)


async def written(reply, request, max_tokens=64):
    heard = []

    async def teach(task, messages, tools):
        heard.append((task, messages, tools))
        if isinstance(reply, Exception):
            raise reply
        return reply

    completion = await TeacherWriter(teach, "mine:teach", make_task(), CHAT).write(request, (), max_tokens)
    return completion, heard


async def test_a_teacher_is_told_the_task_with_its_answer_the_messages_and_the_tools():
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "2"}
    _, [(task, messages, tools)] = await written("2", asked(user("?"), calls, result, tools=[ADD]))
    assert task.answer == "42"
    assert [one["role"] for one in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert tools == [ADD]


@pytest.mark.parametrize(
    ("reply", "more"),
    [
        ("x" * 80, {}),
        ("no JSON", {"response_format": {"type": "json_object"}}),
        (3, {}),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}, {}),
        (KeyError("x"), {}),
        ("", {}),
        ({"role": "assistant", "content": None}, {}),
    ],
)
async def test_what_the_policy_could_not_have_sampled_is_no_demonstration(reply, more):
    with pytest.raises(RequestError):
        await written(reply, asked(user("?"), **more))


async def test_json_that_a_request_demands_is_written_as_the_policy_writes_it():
    """Regression: without the policy's white space, as pydantic and OpenAI's models write it, it was left out."""
    request = asked(user("?"), response_format={"type": "json_object"}, tools=[ADD])
    completion, _ = await written('{"a":1,\n"b":"\\u00e9"}\n', request)
    assert (text_of(completion.token_ids), completion.text) == ('{"a": 1, "b": "é"}<e>', '{"a": 1, "b": "é"}')


def line(*messages, **more):
    return json.dumps({"messages": list(messages), **more})


async def imitated(path, *lines, rules=RULES):
    path.write_text("\n".join(lines))
    conversations = read_conversations(str(path))
    return [await recorded_trajectory(one, index, CHAT, rules) for index, one in enumerate(conversations)]


async def test_every_message_of_the_assistant_is_a_turn_of_one_growing_dialogue(tmp_path):
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "2"}
    one = line(user("1+1?"), calls, result, {"role": "assistant", "content": "2"}, tools=[ADD])
    [trajectory] = await imitated(tmp_path / "chats.jsonl", one, rules=replace(RULES, max_tokens=200))
    first, last = trajectory.turns
    own = first.prompt_token_ids + first.token_ids
    assert first.text == called('{"a": 1}')
    assert last.prompt_token_ids[: len(own)] == own
    assert (trajectory.answer, trajectory.branches) == ("2", ((0, 1),))
    assert all(turn.trainable for turn in trajectory.turns)


async def test_a_message_whose_weight_is_zero_is_context_and_not_imitated(tmp_path):
    wrong, right = ({"role": "assistant", "content": str(3 - one), "weight": one} for one in (0, 1))
    [trajectory] = await imitated(tmp_path / "chats.jsonl", line(user("1+1?"), wrong, user("Sure?"), right))
    assert [turn.trainable for turn in trajectory.turns] == [False, True]
    assert text_of(trajectory.turns[1].prompt_token_ids).startswith("<s>user:1+1?<e><s>assistant:3<e>")


async def test_greeting_and_empty_reply_of_weight_zero_are_context_and_parts_are_text(tmp_path):
    parts = [{"type": "text", "text": "do"}, {"type": "text", "text": "ne"}]
    hello, nothing = ({"role": "assistant", "content": text, "weight": 0} for text in ("hello", None))
    one = line(hello, user([parts[0]]), nothing, {"role": "user"}, {"role": "assistant", "content": parts})
    [trajectory] = await imitated(tmp_path / "chats.jsonl", one)
    [turn] = trajectory.turns
    assert (turn.text, turn.trainable, trajectory.task.question) == ("done", True, "do")
    assert text_of(turn.prompt_token_ids).startswith("<s>assistant:hello<e><s>user:do<e>")


async def test_reply_that_thinks_is_refused_where_the_template_writes_thoughts_itself(tmp_path):
    thinking = ChatFormat(ScriptedTokenizer())
    thinking.pieces = dataclasses.replace(CHAT.pieces, generation=CHAT.pieces.generation + "<think>\n\n</think>\n\n")
    (tmp_path / "a.jsonl").write_text(line(user("?"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\na"}))
    [conversation] = read_conversations(str(tmp_path / "a.jsonl"))
    with pytest.raises(UserError, match="line 1"):
        await recorded_trajectory(conversation, 0, thinking, RULES)
    assert (await recorded_trajectory(conversation, 0, CHAT, RULES)).answer.endswith("a")


@pytest.mark.parametrize(
    "text",
    [
        *("[]", '{"messages": [{"role": "owl"}]}', '{"messages": ' + "[" * 100_000, line(user("x"))),
        line(user("x"), {"role": "assistant", "tool_calls": [CALL]}),
        *(line(user("x"), {"role": "assistant", "content": "y", "weight": weight}) for weight in (0, "0")),
        *(line(user("x"), {"role": "assistant", "content": content}) for content in (None, [], "y" * 99)),
        line(user("x"), {"role": "assistant", "content": " "}, user("y"), {"role": "assistant", "content": "z"}),
        line({"role": "assistant", "content": "hello"}, user("x"), {"role": "assistant", "content": "z"}),
    ],
)
async def test_a_file_that_cannot_be_imitated_names_the_line(tmp_path, text):
    with pytest.raises(UserError, match="line 1"):
        await imitated(tmp_path / "chats.jsonl", text)


TEACHERS = """
import threading

def plain(task, messages, tools):
    return threading.current_thread() is not threading.main_thread() and task

async def slow(task):
    return task

def around(task, messages, tools):
    return slow(task)

async def two(a, b): ...
"""


async def test_a_teacher_is_a_function_of_three_and_a_plain_one_has_a_thread(tmp_path, monkeypatch):
    (tmp_path / "teachers_of_a_test.py").write_text(TEACHERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert await load_teacher(TeacherConfig(function="teachers_of_a_test:plain"))("a task", [], []) == "a task"
    # Regression: a plain function around an async one was said to have replied with a coroutine.
    assert await load_teacher(TeacherConfig(function="teachers_of_a_test:around"))("a task", [], []) == "a task"
    with pytest.raises(OwnCodeError):
        load_teacher(TeacherConfig(function="teachers_of_a_test:two"))
