import json

import pytest

from envs.types import Task, ToolCall, ToolResult
from rollout.records import read_records, trajectory_record
from rollout.types import Completion, Trajectory, Turn


def make_turn(**changes):
    values = {
        "role": "planner",
        "prompt_token_ids": (1, 2, 3),
        "completion": Completion(
            token_ids=(10, 11), logprobs=(-0.123456, -2.0), text="raw text", finish_reason="stop", policy_version=4
        ),
        "trainable": True,
        "thought": "Look it up.",
        "tool_call": ToolCall(name="search", arguments="clay keys"),
        "tool_result": ToolResult(text="37 kg", error=None),
    }
    return Turn(**(values | changes))


def make_trajectory(*turns, **changes):
    values = {
        "id": "g1/0",
        "group_id": "g1",
        "task": Task(id="t1", dataset="lookup", question="How heavy?", answer="37"),
        "turns": turns,
        "answer": "37",
        "stop_reason": "answered",
    }
    return Trajectory(**(values | changes))


def record_of(trajectory, **changes):
    return trajectory_record(trajectory, **({"reward": 1.0, "phase": "train", "step": 3} | changes))


def test_record_holds_the_task_the_judgement_and_where_it_belongs():
    record = record_of(make_trajectory(make_turn()))
    expected = {
        "id": "g1/0",
        "group_id": "g1",
        "phase": "train",
        "step": 3,
        "task_id": "t1",
        "dataset": "lookup",
        "question": "How heavy?",
        "gold": "37",
        "answer": "37",
        "stop_reason": "answered",
        "reward": 1.0,
    }
    assert {key: record[key] for key in expected} == expected
    assert len(record["turns"]) == 1


def test_turn_holds_what_the_planner_decided_and_what_the_sampler_knew():
    (turn,) = record_of(make_trajectory(make_turn()))["turns"]
    assert turn == {
        "role": "planner",
        "thought": "Look it up.",
        "action": "search",
        "action_input": "clay keys",
        "result": "37 kg",
        "tool_error": None,
        "format_error": None,
        "text": "raw text",
        "finish_reason": "stop",
        "policy_version": 4,
        "prompt_tokens": 3,
        "token_ids": [10, 11],
        "logprobs": [-0.1235, -2.0],
    }


def test_failed_tool_call_keeps_the_category_of_its_error():
    failed = make_turn(tool_result=ToolResult(text="SyntaxError", error="syntax"))
    assert record_of(make_trajectory(failed))["turns"][0]["tool_error"] == "syntax"


def test_malformed_turn_has_no_action_but_its_raw_text_and_the_reason():
    malformed = make_turn(tool_call=None, tool_result=None, thought="", format_error="no JSON object")
    (turn,) = record_of(make_trajectory(malformed))["turns"]
    assert (turn["action"], turn["action_input"], turn["result"], turn["tool_error"]) == (None, None, None, None)
    assert (turn["format_error"], turn["text"]) == ("no JSON object", "raw text")


def test_trajectory_that_failed_before_its_first_turn_is_a_record_too():
    record = record_of(make_trajectory(answer=None, stop_reason="infrastructure"), reward=None, step=None)
    assert (record["turns"], record["answer"], record["reward"], record["step"]) == ([], None, None, None)


def test_record_survives_a_round_trip_through_json_with_any_text(tmp_path):
    nasty = 'a "quote", a \\boxed{1}, a \n newline, \u2028 and 苹果'
    record = record_of(make_trajectory(make_turn(thought=nasty, tool_result=ToolResult(text=nasty))))
    path = tmp_path / "trajectories.jsonl"
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    assert list(read_records(path)) == [record]


def test_last_line_that_a_crash_cut_off_is_left_out(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text('{"id": 1}\n{"id": 2}\n{"id": ')
    assert [record["id"] for record in read_records(path)] == [1, 2]


def test_broken_line_inside_the_file_is_an_error_and_not_skipped(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_text('{"id": \n{"id": 2}\n')
    with pytest.raises(json.JSONDecodeError):
        list(read_records(path))
