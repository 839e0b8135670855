"""Run folders as a run leaves them, made of scripted groups, for the tests of the viewer."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from reward.stored import stored_group
from rollout.store.ledger import Ledger
from rollout.store.lifecycle import GroupCounts, GroupResult

from envs.types import Task, ToolCall, ToolResult
from learner.credit import CreditedStep, credit_parts, turn_logprobs
from ray_jobs.run.step_records import step_records
from reward.types import Reward, ScoredGroup, StepScores
from rollout.buffer import Batch
from rollout.records import trajectory_record
from rollout.task_choice import Draw
from rollout.types import Completion, Group, Trajectory, Turn, VersionSwitch

WORDS = ["[UNK]", "weigh", "search", "iron", "bolts", "12", "kg", "times", "answer", "408"]
WEIGHT, LOOK_UP, ANSWER = (5, 6), (1, 2, 3, 4), (8, 9)


def save_tokenizer(folder: Path) -> None:
    """A vocabulary of ten words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")).save(
        str(folder / "tokenizer.json")
    )


def make_turn(
    prompt=(1,), token_ids=LOOK_UP, *, action="search", text="iron bolts", result="Iron bolts: 12 kg.", **more
):
    completion = Completion(
        token_ids=token_ids,
        logprobs=tuple(-0.1 * (index + 1) for index in range(len(token_ids))),
        text=text,
        finish_reason="stop",
        policy_version=1,
        switches=(VersionSwitch(index=2, policy_version=2),) if len(token_ids) > 2 else (),
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
    raw = tuple((0.9, 0.8) if outcome else (0.1,) for outcome in outcomes)
    return ScoredGroup(
        group=Group(id=name, trajectories=trajectories),
        rewards=tuple(Reward(outcome=one, total=one, parts={}) for one in outcomes),
        step_scores=StepScores(raw=raw, prm_digest="d") if scored else None,
    )


def group_rows(scored, step, *, untrained=()):
    """What the train step writes of this group; the learner finds every token a little less likely."""
    drifted = {
        one.id: np.array([p - 0.3 * (n % 3) for n, p in enumerate(_logprobs(one))]) for one in scored.group.trajectories
    }
    batch = Batch(
        step=step,
        payloads=(stored_group(scored),),
        untrained=untrained,
        version_ages={1: 0, 2: 0},
        facts={},
        bias={},
        counts=GroupCounts(),
        warning=None,
    )
    by_turn = {one.id: turn_logprobs(one, drifted, batch.version_ages) for one in scored.group.trajectories}
    credit = {scored.group.id: credit_parts(scored, credit="outcome_gated", prm_weight=0.5)}
    result = CreditedStep(policy_version=step, metrics={}, turn_logprobs=by_turn, credit=credit)
    return (json.loads(one.line()) for one in step_records(batch, batch.payloads, result))


def _logprobs(trajectory):
    return [value for turn in trajectory.planner_turns for value in turn.completion.logprobs]


def evaluation_row(number, phase, *, right):
    """`right` None is one that could not be scored."""
    trajectory = make_trajectory(0, group=phase, task=make_task(number), answer="408" if right else "99")
    reward = None if right is None else float(right)
    return trajectory_record(trajectory, reward=reward, phase=phase, step=None) | {"id": f"{phase}/{number}"}


def metric_row(step, **more):
    shares = {"rollout/solve_rate": min(1.0, 0.1 * step), "rollout/groups_kept_share": 0.5, "prm/score": 0.4}
    return {"step": step, "wall_s": 1.0, "policy/loss": 0.1, "policy/logprob_gap_abs": 0.01, **shares, **more}


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8", errors="replace") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make_run(folder: Path, *, num_steps=3) -> Path:
    """A run of so many steps with one trained group each; and one filtered, one expired and one failed group."""
    folder.mkdir(parents=True)
    save_tokenizer(folder)
    settings = {"name": folder.name, "num_steps": num_steps, "seed": 0, "reward": {"credit": {"type": "outcome_gated"}}}
    (folder / "config.json").write_text(json.dumps(settings))
    append(folder / "metrics.jsonl", map(metric_row, range(1, num_steps + 1)))
    filtered = make_group(num_steps, outcomes=(0.0, 0.0), scored=False)
    rows = [row for step in range(1, num_steps + 1) for row in group_rows(make_group(step - 1), step)]
    rows += list(group_rows(make_group(0), 1, untrained=(("all_wrong", "", stored_group(filtered)),)))[3:]
    for phase, solved in (("eval_before", 1), ("eval_after", 3)):
        rows += [evaluation_row(number, phase, right=number < solved) for number in range(4)]
    append(folder / "trajectories.jsonl", rows)
    _write_ledger(folder, num_steps)
    return folder


def _write_ledger(folder: Path, num_steps: int) -> None:
    ledger = Ledger(folder / "ledger.sqlite")
    permits = ledger.lease(0, num_steps + 3, num_new=num_steps + 3, draw_of=lambda task: Draw("lookup"))
    facts = {"groups": 1.0, "right": 1.0, "scored": 3.0, "trajectories": 3.0}
    result = GroupResult(
        ending="ready", payload=b"", versions={1: 4, 2: 4}, facts=facts, reason="2 of 2 infrastructure"
    )
    for permit in permits[:num_steps]:
        ledger.settle(permit.lease, "ready", result, now=1.0)
        ledger.cut([permit.ordinal], permit.ordinal + 1)
        ledger.mark_trained(permit.ordinal + 1)
    ledger.settle(permits[-3].lease, "all_wrong", result, now=2.0)
    ledger.settle(permits[-2].lease, "ready", result, now=3.0)
    ledger.expire(permits[-2].ordinal, "older than version 3")
    ledger.settle(permits[-1].lease, None, result, now=4.0)
    ledger.close()
