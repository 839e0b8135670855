"""Run folders as a run leaves them, made of scripted groups, for the tests of the viewer."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from envs.types import Task, ToolCall, ToolResult
from learner.types import StepResult
from ray_jobs.run.progress import step_trajectories
from rollout.codec import trajectory_line
from rollout.lifecycle import Batch, GroupCounts, GroupRow, State
from rollout.types import Completion, Group, Reward, StepScores, Trajectory, Turn

WORDS = ["[UNK]", "weigh", "search", "iron", "bolts", "12", "kg", "times", "answer", "408"]
WEIGHT, LOOK_UP, ANSWER = (5, 6), (1, 2, 3, 4), (8, 9)


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    Tokenizer(words).save(str(folder / "tokenizer.json"))


def make_turn(
    prompt=(1,), token_ids=LOOK_UP, *, action="search", text="iron bolts", result="Iron bolts: 12 kg.", **more
):
    completion = Completion(
        token_ids=token_ids,
        logprobs=tuple(-0.1 * (index + 1) for index in range(len(token_ids))),
        text=text,
        finish_reason="stop",
        policy_version=1,
        switches=((2, 2),) if len(token_ids) > 2 else (),
    )
    decided: dict[str, Any] = {
        "thought": "Find the weight.",
        "tool_call": ToolCall(name=action, arguments=text),
        "tool_result": ToolResult(text=result),
    }
    return Turn.of(role="planner", prompt_token_ids=prompt, completion=completion, trainable=True, **(decided | more))


def make_trajectory(number, *, group="g000000", task=None, turns=None, answer="408", **more):
    look = make_turn()
    again = make_turn((1, *LOOK_UP, 0), ANSWER, action="answer", text=answer, result=answer)
    return Trajectory(
        id=f"{group}/{number}",
        group_id=group,
        task=task or make_task(0),
        turns=turns if turns is not None else (look, again),
        answer=answer,
        stop_reason="answered",
        **more,
    )


def make_task(number, question=None):
    asks = question or f"How many kg do {number + 34} crates of iron bolts weigh?"
    return Task(id=f"lookup-{number}", dataset="lookup", question=asks, answer="408")


def make_group(ordinal, *, outcomes=(1.0, 0.0, 0.0), scored=True, question=None):
    """The right attempts look up and answer in two steps, the wrong ones guess in one."""
    name, task = f"g{ordinal:06d}", make_task(ordinal, question)
    guess = (make_turn((1,), ANSWER, action="answer", text="99", result="99"),)
    trajectories = tuple(
        make_trajectory(number, group=name, task=task, **({} if outcome else {"turns": guess, "answer": "99"}))
        for number, outcome in enumerate(outcomes)
    )
    group = Group(id=name, trajectories=trajectories)
    for trajectory, outcome in zip(trajectories, outcomes, strict=True):
        trajectory.reward = Reward(outcome=outcome, total=outcome)
    if scored:
        raw = tuple((0.9, 0.8) if outcome else (0.1,) for outcome in outcomes)
        StepScores(raw=raw, prm_digest="d").write_to(group)
    return group


def make_batch(step, **changes):
    facts = {"refs": (), "version_ages": {1: 0, 2: 0}, "facts": {}, "solved": {}, "bias": {}}
    return Batch(step=step, counts=GroupCounts(), **(facts | changes))


def trained(group, step):
    """The trajectories of a trained group; the learner finds every token a little less likely."""
    drifted = {}
    for one in group.trajectories:
        logprobs = [value for turn in one.planner_turns for value in turn.completion.logprobs]
        drifted[one.id] = np.array([p - 0.3 * (n % 3) for n, p in enumerate(logprobs)], dtype=np.float32)
    result = StepResult(policy_version=step, metrics={}, learner_logprobs=drifted)
    return step_trajectories(make_batch(step), [group], result, scheme="outcome_guided")


def untrained(group, step, verdict):
    for trajectory in group.trajectories:
        trajectory.step, trajectory.verdict = step, verdict
    return group.trajectories


def evaluation_row(number, phase, *, right):
    """`right` None is one that could not be scored."""
    attempt = make_trajectory(0, group=phase, task=make_task(number), answer="408" if right else "99", phase=phase)
    reward = None if right is None else float(right)
    attempt.reward, attempt.id = Reward(outcome=reward, total=reward), f"{phase}/{number}"
    return attempt


def metric_row(step, **more):
    shares = {"rollout/solve_rate": min(1.0, 0.1 * step), "util/kept_share": 0.5, "prm/score": 0.4}
    return {"step": step, "wall_s": 1.0, "policy/loss": 0.1, "policy/logprob_gap_abs": 0.01, **shares, **more}


def append(path: Path, rows: Iterable[Mapping[str, Any] | Trajectory | GroupRow]) -> None:
    with path.open("ab") as file:
        for row in rows:
            file.write(trajectory_line(row) if isinstance(row, Trajectory) else msgspec.json.encode(row) + b"\n")


def make_run(folder: Path, *, num_steps=3) -> Path:
    """A run of so many steps with one trained group each; and one filtered, one expired and one failed group."""
    folder.mkdir(parents=True)
    save_tokenizer(folder)
    settings = {
        "name": folder.name,
        "num_steps": num_steps,
        "seed": 0,
        "reward": {"credit": {"type": "outcome_guided"}},
    }
    (folder / "config.json").write_text(json.dumps(settings))
    append(folder / "metrics.jsonl", map(metric_row, range(1, num_steps + 1)))
    filtered = make_group(num_steps, outcomes=(0.0, 0.0), scored=False)
    rows = [row for step in range(1, num_steps + 1) for row in trained(make_group(step - 1), step)]
    rows += untrained(filtered, 1, "all_wrong")
    for phase, solved in (("eval_before", 1), ("eval_after", 3)):
        rows += [evaluation_row(number, phase, right=number < solved) for number in range(4)]
    append(folder / "trajectories.jsonl", rows)
    append(folder / "groups.jsonl", make_group_rows(num_steps))
    return folder


def make_group_row(ordinal, state, step, **changes):
    facts = {"family": "lookup", "num_tries": 1, "duration_s": 1.0, "tokens": 8, "versions": (1, 2)}
    facts |= {"right": 1.0, "scored": 3, "reason": ""}
    return GroupRow(id=f"g{ordinal:06d}", task_number=ordinal, state=state, step=step, **(facts | changes))


def make_group_rows(num_steps):
    rows = [make_group_row(ordinal, State.TRAINED, ordinal + 1) for ordinal in range(num_steps)]
    return [
        *rows,
        make_group_row(num_steps, State.ALL_WRONG, 1, right=0.0),
        make_group_row(num_steps + 1, State.EXPIRED, 2, reason="older than version 3"),
        make_group_row(num_steps + 2, State.FAILED, 3, reason="2 of 2 infrastructure"),
    ]
