import json
import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.types import Task, ToolCall, ToolResult
from reward.stored import scored_group_of, stored_group, verbatim_group
from reward.types import Reward, ScoredGroup, StepScores
from rollout.records import trajectory_record
from rollout.types import Completion, TextCompletion, Trajectory, TrajectoryGroup, Turn, VersionSwitch

HOSTILE = (
    '"logprobs": [1, 2]',
    ', "turns": [',
    '{"id": "',
    '], "rewards": [',
    "]}",
    '"prompt_token_ids": []\\',
    "Wie viele Äpfel? 苹果 \U0001f34e",
)


def make_turn(text, prompt, tokens, *, role="planner", server=False):
    completion = (
        TextCompletion(text=text, finish_reason="stop", num_prompt_tokens=3, num_tokens=4)
        if server
        else Completion(
            token_ids=tokens,
            logprobs=tuple(-token / 3 for token in tokens),
            text=text,
            finish_reason="stop",
            policy_version=1,
            switches=(VersionSwitch(index=1, policy_version=2),) if len(tokens) > 1 else (),
        )
    )
    return Turn(
        role=role,
        prompt_token_ids=prompt,
        completion=completion,
        trainable=role == "planner",
        thought=text,
        tool_call=ToolCall(name="search", arguments=text),
        tool_result=ToolResult(text=text),
    )


def make_group(text, *, server=False):
    """Trajectories that continue their prompts and ones that do not, with other roles between, and one without
    turns."""
    first = make_turn(text, (1, 2), (7, 8), server=server)
    verifier = make_turn(text, (1, 2, 7), (5,), role="verifier")
    going_on = make_turn(text, (1, 2, 7, 8, 9), (4,))
    other = make_turn("x", (1, 2), (7,))
    anew = make_turn(text, (1, 2, 7, 8, 9), (4,))
    turns = [(first, verifier, going_on), (other, anew), ()]
    task = Task(id=text, dataset="arith", question=text, answer=text)
    trajectories = tuple(
        Trajectory(id=f"g/{index}", group_id="g", task=task, turns=own, answer=text, stop_reason="answered")
        for index, own in enumerate(turns)
    )
    return ScoredGroup(
        group=TrajectoryGroup(id="g", task=task, trajectories=trajectories),
        rewards=tuple(Reward(outcome=one, total=one, parts={"outcome": 1.0}) for one in (1.0, 0.0, None)),
        step_scores=StepScores(raw=((0.5, None), (0.1, 0.2), ()), prm_digest="d"),
    )


def written(text):
    """What a file has of it."""
    return text.encode(errors="replace").decode()


@given(st.text(st.characters(codec=None), max_size=20), st.booleans())
@example(", ".join(HOSTILE), False)
@example("half a pair \ud800", True)
def test_lines_are_those_that_are_written_from_the_group(text, server):
    data = stored_group(make_group(text, server=server))
    for record, trajectory in zip(verbatim_group(data).records, scored_group_of(data).group.trajectories, strict=True):
        head = {name: value for name, value in record.fields.items() if name != "turns"}
        line = record.line(head, [b', "learner_logprobs": [1.0]'] * len(trajectory.turns))
        expected = trajectory_record(trajectory, reward=head["reward"], phase="train", step=None)
        expected["turns"] = [turn | {"learner_logprobs": [1.0]} for turn in expected["turns"]]
        assert json.loads(line) == json.loads(written(json.dumps(expected, ensure_ascii=False)))
        assert "\\u" in text or b"\\u00c4" not in line


def test_what_is_parsed_is_the_group_without_its_tokens():
    scored = make_group("x")
    found = verbatim_group(stored_group(scored))
    assert (found.scored.rewards, found.scored.step_scores) == (scored.rewards, scored.step_scores)
    for mine, own in zip(found.scored.group.trajectories, scored.group.trajectories, strict=True):
        assert [turn.tool_call for turn in mine.turns] == [turn.tool_call for turn in own.turns]
        assert [turn.completion.token_ids for turn in mine.turns] == [()] * len(own.turns)
    logprobs = [[np.asarray(turn["logprobs"]).tolist() for turn in record.fields["turns"]] for record in found.records]
    assert [len(turn["logprobs"]) for turn in found.records[0].fields["turns"]] == [2, 1, 1]
    assert logprobs[0] == [[-7 / 3, -8 / 3], [-5 / 3], [-4 / 3]]


def test_prompts_are_told_apart_by_their_tokens_however_they_came_about():
    """One continues the turn before, one does not."""
    first, second, _ = verbatim_group(stored_group(make_group("x"))).scored.group.trajectories
    assert first.turns[2].prompt_token_ids == second.turns[1].prompt_token_ids
    assert first.turns[0].prompt_token_ids == second.turns[0].prompt_token_ids != first.turns[2].prompt_token_ids


def test_group_of_another_schema_is_refused():
    data = json.loads(zlib.decompress(stored_group(make_group("x"))))
    with pytest.raises(ValueError, match="schema 9, this version reads 1"):
        verbatim_group(zlib.compress(json.dumps(data | {"schema": 9}).encode()))
