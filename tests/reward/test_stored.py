import json
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.types import Task, ToolCall, ToolResult
from reward.stored import scored_group_of, stored_group
from reward.types import Reward, ScoredGroup, StepScores
from rollout.records import readable
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


@given(st.text(st.characters(codec=None), max_size=20), st.booleans())
@example(", ".join(HOSTILE), False)
@example("half a pair \ud800", True)
def test_a_group_comes_back_as_it_was(text, server):
    scored = make_group(text, server=server)
    assert scored_group_of(stored_group(scored)) == scored


def test_groups_of_earlier_releases_have_plain_lists_and_are_read():
    scored = make_group("x")
    record = json.loads(zlib.decompress(stored_group(scored)))
    plain = record | {"schema": 1, "trajectories": list(map(readable, record["trajectories"]))}
    assert plain["trajectories"][0]["turns"][0]["token_ids"] == [7, 8]
    assert scored_group_of(zlib.compress(json.dumps(plain).encode())) == scored


def test_group_of_another_schema_is_refused():
    data = json.loads(zlib.decompress(stored_group(make_group("x"))))
    with pytest.raises(ValueError, match="schema 9, this version reads 1 to 2"):
        scored_group_of(zlib.compress(json.dumps(data | {"schema": 9}).encode()))
