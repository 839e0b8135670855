import json
from dataclasses import replace

import pytest
from scripted import ScriptedTool, decision, make_agent, run

from configs.errors import UserError
from envs.types import Task, ToolCall, ToolResult, ToolUnavailableError
from rollout.records import (
    RecordLine,
    append_record,
    exact_line,
    head_of,
    read_heads,
    read_records,
    readable,
    trajectory_of,
    trajectory_record,
)
from rollout.types import SERVED_VERSION, Completion, TextCompletion, Trajectory, Turn, VersionSwitch


def make_turn(**changes):
    values = {
        "role": "planner",
        "prompt_token_ids": (1, 2, 3),
        "completion": Completion(
            token_ids=(10, 11),
            logprobs=(-0.12345678901234567, -2.0),
            text="raw text",
            finish_reason="stop",
            policy_version=4,
            switches=(VersionSwitch(index=1, policy_version=6),),
        ),
        "trainable": True,
        "thought": "Look it up.",
        "tool_call": ToolCall(name="search", arguments="clay keys"),
        "tool_result": ToolResult(text="37 kg", error=None),
        "generate_s": 1.25,
        "tool_s": 0.5,
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
    (turn,) = readable(record_of(make_trajectory(make_turn())))["turns"]
    assert turn == {
        "role": "planner",
        "thought": "Look it up.",
        "action": "search",
        "action_input": "clay keys",
        "result": "37 kg",
        "tool_error": None,
        "foreign": False,
        "format_error": None,
        "heard": None,
        "text": "raw text",
        "finish_reason": "stop",
        "policy_version": 4,
        "switches": [[1, 6]],
        "generate_s": 1.25,
        "tool_s": 0.5,
        "trainable": True,
        "grammar": None,
        "prompt_tokens": 3,
        "continues": True,
        "prompt_token_ids": [1, 2, 3],
        "token_ids": [10, 11],
        "logprobs": [-0.12345678901234567, -2.0],
        "served": None,
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


@pytest.mark.parametrize("read", [read_records, read_heads])
@pytest.mark.parametrize("torn", [b'{"id": ', b'{"id": "\xe8"}', b'{"id": 1}{"id": 2}', b"[]", b"5"])
def test_broken_line_inside_the_file_is_named_and_not_skipped(tmp_path, torn, read):
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(b'{"id": 0}\n' + torn + b'\n{"id": 3}\n')
    said = rf"^'{path}', line 2, is no JSON object: it was damaged after it was written; put the file back "
    with pytest.raises(UserError, match=said):
        list(read(path))


def test_heads_stand_with_their_lines(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    line = exact_line(record_of(make_trajectory(make_turn())))
    path.write_bytes(line + line[:-9])
    assert list(read_heads(path)) == [(line, head_of(line))]


# Back from a record.


def back_from_disk(trajectory):
    return trajectory_of(json.loads(json.dumps(record_of(trajectory))))


def malformed(**changes):
    return make_turn(tool_call=None, tool_result=None, thought="", format_error="no JSON object", **changes)


def verifying(**changes):
    return make_turn(
        role="verifier", trainable=False, thought="", tool_call=None, tool_result=None, grammar="g", **changes
    )


FIRST = make_turn(grammar="root ::= x")
AFTER_FIRST = FIRST.prompt_token_ids + FIRST.token_ids

EPISODES = {
    "one turn": make_trajectory(FIRST),
    "a prompt that continues": make_trajectory(FIRST, make_turn(prompt_token_ids=(*AFTER_FIRST, 50, 51))),
    "a prompt that does not": make_trajectory(FIRST, make_turn(prompt_token_ids=(1, 2, 3, 99, 11, 50))),
    "a prompt shorter than what was before": make_trajectory(FIRST, make_turn(prompt_token_ids=(1, 2))),
    "a malformed turn and a failed tool": make_trajectory(
        malformed(), make_turn(tool_result=ToolResult(text="SyntaxError", error="syntax"))
    ),
    "only malformed turns": make_trajectory(malformed(), malformed(), answer=None, stop_reason="format"),
    "verifier turns with prompts of their own": make_trajectory(
        FIRST,
        verifying(prompt_token_ids=(70, 71)),
        make_turn(prompt_token_ids=(*AFTER_FIRST, 50)),
        verifying(prompt_token_ids=AFTER_FIRST),
    ),
    "a broken end": make_trajectory(FIRST, answer=None, stop_reason="infrastructure"),
    "a break before the first turn": make_trajectory(answer=None, stop_reason="infrastructure"),
    "a full context": make_trajectory(FIRST, answer=None, stop_reason="context"),
    "an empty result": make_trajectory(make_turn(tool_result=ToolResult(text=""))),
}


@pytest.mark.parametrize("trajectory", EPISODES.values(), ids=EPISODES.keys())
def test_a_trajectory_comes_back_as_it_was_to_the_last_bit(trajectory):
    assert back_from_disk(trajectory) == trajectory


@pytest.mark.parametrize("switches", [(), ((1, 6),), ((1, 5), (1, 6)), ((0, 5), (1, 9))])
def test_the_versions_that_sampled_a_turn_come_back_whether_it_switched_or_not(switches):
    completion = replace(
        FIRST.completion,
        switches=tuple(VersionSwitch(index=index, policy_version=version) for index, version in switches),
    )
    (turn,) = back_from_disk(make_trajectory(replace(FIRST, completion=completion))).turns
    assert turn.completion == completion
    assert turn.completion.token_versions == completion.token_versions


@pytest.mark.parametrize("logprob", [-1e-300, -1 / 3, -16777216.000000002, 0.0, -0.30000000000000004])
def test_any_log_prob_comes_back_exactly(logprob):
    turn = replace(FIRST, completion=replace(FIRST.completion, logprobs=(logprob, -2.0)))
    assert back_from_disk(make_trajectory(turn)).turns[0].completion.logprobs[0] == logprob


async def test_what_the_agent_really_plays_comes_back():
    code = decision("code", "6*7")
    played = await run(make_agent(["rubbish", code + "…", code, code, decision("answer", "42")], format_retries=2))
    assert (played.num_format_errors, played.truncated, played.stop_reason) == (2, True, "answered")
    assert back_from_disk(played) == played


async def test_an_episode_that_a_tool_broke_comes_back():
    tool = ScriptedTool("code", {"1": "1", "2": ToolUnavailableError("down")})
    broken = await run(make_agent([decision("code", "1"), decision("code", "2")], tools=[tool]))
    assert (broken.stop_reason, len(broken.turns)) == ("infrastructure", 1)
    assert back_from_disk(broken) == broken


def test_a_prompt_is_written_down_only_as_far_as_it_is_new():
    trajectory = EPISODES["a prompt that continues"]
    first, second = readable(record_of(trajectory))["turns"]
    assert (first["prompt_token_ids"], second["prompt_token_ids"]) == ([1, 2, 3], [50, 51])
    assert second["prompt_tokens"] == 3 + 2 + 2


# Appending.


def test_records_are_appended_in_order(tmp_path):
    path = tmp_path / "records.jsonl"
    for number in range(3):
        append_record(path, {"id": number})
    assert [record["id"] for record in read_records(path)] == [0, 1, 2]


@pytest.mark.parametrize("torn", ['{"id": 1', "{", '{"id": 1}', '{"text": "苹'])
def test_a_torn_line_is_cut_off_before_the_next_record_is_appended(tmp_path, torn):
    path = tmp_path / "records.jsonl"
    path.write_text('{"id": 0}\n' + torn, encoding="utf-8")
    append_record(path, {"id": 2})
    assert path.read_text() == '{"id": 0}\n{"id": 2}\n'


def test_a_file_that_is_nothing_but_a_torn_line_starts_anew(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"id": ')
    append_record(path, {"id": 2})
    assert path.read_text() == '{"id": 2}\n'


def cut_inside_a_character(path):
    append_record(path, {"text": "first"})
    append_record(path, {"text": "苹"})
    content = path.read_bytes()
    path.write_bytes(content[: content.index("苹".encode()) + 1])


def test_a_record_that_was_cut_inside_a_character_is_cut_off_too(tmp_path):
    path = tmp_path / "records.jsonl"
    cut_inside_a_character(path)
    append_record(path, {"text": "second"})
    assert [record["text"] for record in read_records(path)] == ["first", "second"]


def test_a_last_line_that_was_cut_inside_a_character_is_left_out(tmp_path):
    path = tmp_path / "records.jsonl"
    cut_inside_a_character(path)
    assert [record["text"] for record in read_records(path)] == ["first"]


@pytest.mark.parametrize("further", [{"level": 1, "turns": ["first", "second"]}, {"of": {"level": 1, "turns": [1]}}])
def test_a_column_of_a_task_that_is_called_turns_is_no_end_of_the_head(further):
    """Regression: no line of such a task could be read, so that the run ended at its first batch."""
    task = Task(id="t1", dataset="mine", question="How heavy?", answer="37", metadata=further)
    line = exact_line(record_of(make_trajectory(make_turn(), task=task)))
    assert head_of(line)["scoring"]["metadata"] == further
    assert RecordLine.of(line).record() == json.loads(line)


def test_half_a_surrogate_pair_can_be_written_down(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, {"text": json.loads('"half \\ud83d"')})
    assert [record["text"][:5] for record in read_records(path)] == ["half "]


def test_a_server_s_turn_comes_back_as_one_that_can_never_be_trained_on():
    completion = TextCompletion(text="raw text", finish_reason="stop", num_prompt_tokens=41, num_tokens=7)
    turn = make_turn(prompt_token_ids=(), completion=completion, trainable=False)
    trajectory = make_trajectory(turn)
    record = json.loads(json.dumps(record_of(trajectory)))
    assert trajectory_of(record) == trajectory
    assert trajectory.served
    assert (completion.token_ids, completion.logprobs, completion.policy_version) == ((), (), SERVED_VERSION)


def test_a_record_of_an_earlier_run_without_the_field_was_sampled_by_the_run():
    trajectory = make_trajectory(make_turn())
    record = record_of(trajectory)
    del record["turns"][0]["served"]
    assert trajectory_of(record) == trajectory
    assert not trajectory.served
