import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError
from envs.types import Task, ToolCall, ToolResult
from rollout.codec import (
    SchemaError,
    decode_group,
    encode_group,
    flat_record,
    group_line,
    group_of,
    read_trajectories,
    trajectory_line,
    trajectory_of,
)
from rollout.files import append_line, append_record, read_records
from rollout.types import Completion, Group, GroupCredit, Reward, Spread, Trajectory, Turn
from tests.reward.test_step_text import completion, make_trajectory, sampled

TEXTS = st.text(max_size=20)


@st.composite
def trajectories(draw):
    turns, prompt = [], tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)))
    for _ in range(draw(st.integers(0, 4))):
        ids = tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)))
        completion = Completion(
            token_ids=ids,
            logprobs=tuple(draw(st.floats(-50, 0, width=32)) for _ in ids),
            text=draw(TEXTS),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
            policy_version=draw(st.integers(-1, 5)),
            switches=((1, 7),) if len(ids) > 1 else (),
        )
        turn = Turn.of(
            role=draw(st.sampled_from(["planner", "planner", "verifier"])),
            prompt_token_ids=prompt,
            completion=completion,
            trainable=draw(st.booleans()),
            tool_call=draw(st.none() | st.builds(ToolCall, name=TEXTS, arguments=TEXTS)),
            tool_result=draw(st.none() | st.builds(ToolResult, text=TEXTS, error=st.none() | TEXTS)),
            score=draw(st.none() | st.floats(0, 1)),
        )
        assert turn.completion == completion
        assert turn.prompt_token_ids == prompt
        turns.append(turn)
        if draw(st.booleans()):
            prompt = (*prompt, *ids, *draw(st.lists(st.integers(0, 9), max_size=3)))
    task = Task(id="t", dataset="d", question=draw(TEXTS), answer="a", metadata={"x": [1, None, {"y": "z"}]})
    return Trajectory(
        id="g/0",
        group_id="g",
        task=task,
        turns=tuple(turns),
        answer=draw(st.none() | TEXTS),
        stop_reason="answered",
        reward=draw(st.none() | st.just(Reward(outcome=1.0, total=0.5))),
        credit=GroupCredit(scheme="outcome", totals=Spread(num=1, mean=1.0, std=0.0)),
    )


@given(trajectories())
def test_a_group_comes_back_as_it_was(trajectory):
    group = Group(id="g", trajectories=(trajectory, trajectory))
    assert decode_group(encode_group(group)) == group
    assert group_of(group_line(group)) == group
    assert trajectory_of(trajectory_line(trajectory)) == trajectory


@given(trajectories())
def test_a_flat_record_is_json_and_names_every_turn(trajectory):
    record = json.loads(json.dumps(flat_record(trajectory)))
    assert len(record["turns"]) == len(trajectory.turns)
    for shown, turn in zip(record["turns"], trajectory.turns, strict=True):
        assert shown["token_ids"] == list(turn.completion.token_ids)
        assert shown["prompt_tokens"] == len(turn.prompt_token_ids)


def test_a_dialogue_is_stored_once():
    turns = [sampled(tuple(range(2000)), completion(token_ids=(3, 4)))]
    for _ in range(20):
        turns.append(sampled((*turns[-1].prompt_token_ids, 3, 4, 9), completion(token_ids=(3, 4))))
    assert len(encode_group(Group(id="g", trajectories=(make_trajectory(*turns),)))) < 2 * 4 * 2000


def test_half_a_surrogate_pair_becomes_a_question_mark():
    written = trajectory_line(make_trajectory(sampled((1, 2), completion("half \ud83d"))))
    assert trajectory_of(written).turns[0].text == "half ?"


@pytest.mark.parametrize("data", [b"", b"junk", b"{}", b'{"schema": 3, "id": "g/0"}'])
def test_another_schema_is_rejected(data):
    with pytest.raises(SchemaError):
        trajectory_of(data)
    with pytest.raises(SchemaError):
        decode_group(data)


def test_files_of_lines_leave_out_what_a_crash_cut_off_and_name_a_damaged_line(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    line = trajectory_line(make_trajectory(sampled((1, 2), completion()), id="g/0"))
    path.write_bytes(line + line[:20])
    assert [one.id for one in read_trajectories(path)] == ["g/0"]
    append_line(path, line)
    assert len(list(read_trajectories(path))) == 2
    append_record(path, {"schema": 1})
    with pytest.raises(UserError):
        list(read_trajectories(path))
    assert len(list(read_records(path))) == 3
