import json
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.types import Task, ToolCall, ToolResult
from reward.stored import StoredGroup, scored_group_of, stored_group
from reward.types import Reward, ScoredGroup, StepScores
from rollout.records import head_of, readable
from rollout.types import Completion, TextCompletion, Trajectory, Group, Turn, VersionSwitch

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
        group=Group(id="g", task=task, trajectories=trajectories),
        rewards=tuple(Reward(outcome=one, total=one, parts={"outcome": 1.0}) for one in (1.0, 0.0, None)),
        step_scores=StepScores(raw=((0.5, None), (0.1, 0.2), ()), prm_digest="d"),
    )


@given(st.text(st.characters(codec=None), max_size=20), st.booleans())
@example(", ".join(HOSTILE), False)
@example("half a pair \ud800", True)
def test_a_group_comes_back_as_it_was(text, server):
    scored = make_group(text, server=server)
    assert scored_group_of(stored_group(scored)) == scored


def of_an_earlier_release(scored, schema):
    """All of the group as one JSON value."""
    head, *lines = zlib.decompress(stored_group(scored)).splitlines()
    trajectories = list(map(json.loads, lines))
    if schema == 1:
        trajectories = list(map(readable, trajectories))
    return zlib.compress(json.dumps(json.loads(head) | {"schema": schema, "trajectories": trajectories}).encode())


@pytest.mark.parametrize("schema", [1, 2])
def test_groups_of_earlier_releases_are_read(schema):
    scored = make_group("x")
    data = of_an_earlier_release(scored, schema)
    assert (b'"token_ids": [7, 8]' in zlib.decompress(data)) == (schema == 1)
    assert scored_group_of(data) == scored


def test_group_of_another_schema_is_refused():
    with pytest.raises(ValueError, match="schema 9, this version reads 1 to 3"):
        scored_group_of(of_an_earlier_release(make_group("x"), 9))


def test_trajectories_of_a_group_stay_the_lines_that_were_written():
    data = stored_group(make_group("Äpfel"))
    stored = StoredGroup.of(data)
    assert b"".join(stored.lines) == zlib.decompress(data).partition(b"\n")[2]
    assert [head_of(line)["id"] for line in stored.lines] == ["g/0", "g/1", "g/2"]
