"""Trajectories as JSON lines, for reading why a step got its reward."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from envs.types import Task, ToolCall, ToolResult
from rollout.types import Completion, Trajectory, Turn, VersionSwitch


def trajectory_record(trajectory: Trajectory, *, reward: float | None, phase: str, step: int | None) -> dict[str, Any]:
    """Everything known of a trajectory, ready for JSON. `reward` None: it could not be scored."""
    return {
        "id": trajectory.id,
        "group_id": trajectory.group_id,
        "phase": phase,
        "step": step,
        "task_id": trajectory.task.id,
        "dataset": trajectory.task.dataset,
        "question": trajectory.task.question,
        "gold": trajectory.task.answer,
        "answer": trajectory.answer,
        "stop_reason": trajectory.stop_reason,
        "reward": reward,
        "turns": list(map(_turn_record, trajectory.turns, _planner_turns_before(trajectory))),
    }


def trajectory_of(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `trajectory_record` wrote down, log-probs to the last bit."""
    turns: list[Turn] = []
    so_far: tuple[int, ...] = ()
    for row in record["turns"]:
        turn = _turn_of(row, so_far)
        turns.append(turn)
        if turn.role == "planner":
            so_far = turn.prompt_token_ids + turn.completion.token_ids
    return Trajectory(
        id=record["id"],
        group_id=record["group_id"],
        task=Task(
            id=record["task_id"],
            dataset=record["dataset"],
            question=record["question"],
            answer=record["gold"],
        ),
        turns=tuple(turns),
        answer=record["answer"],
        stop_reason=record["stop_reason"],
    )


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """One line, flushed before it returns. A line that a crash cut off before is taken away first, so that the new
    one does not become its end."""
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size and not _ends_a_line(file, size):
            file.truncate(_end_of_last_line(file, size))
        # Half a surrogate pair, which a model may write, has no UTF-8; it becomes a question mark.
        file.write(json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line that was cut off by a crash is left out."""
    with path.open("rb") as lines:
        for line in lines:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _ends_a_line(file: BinaryIO, size: int) -> bool:
    file.seek(size - 1)
    return file.read(1) == b"\n"


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1


def _planner_turns_before(trajectory: Trajectory) -> Iterator[tuple[int, ...]]:
    """For each turn, the tokens up to the end of the planner turn before it."""
    so_far: tuple[int, ...] = ()
    for turn in trajectory.turns:
        yield so_far
        if turn.role == "planner":
            so_far = turn.prompt_token_ids + turn.completion.token_ids


def _turn_record(turn: Turn, before: tuple[int, ...]) -> dict[str, Any]:
    """`before` is left out of the prompt where the prompt continues it; most do, and a record stays short."""
    call, result, completion = turn.tool_call, turn.tool_result, turn.completion
    continues = turn.role == "planner" and turn.prompt_token_ids[: len(before)] == before
    return {
        "role": turn.role,
        "thought": turn.thought,
        "action": call.name if call else None,
        "action_input": call.arguments if call else None,
        "result": result.text if result else None,
        "tool_error": result.error if result else None,
        "format_error": turn.format_error,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "switches": [[switch.index, switch.policy_version] for switch in completion.switches],
        "generate_s": turn.generate_s,
        "tool_s": turn.tool_s,
        "trainable": turn.trainable,
        "grammar": turn.grammar,
        "prompt_tokens": len(turn.prompt_token_ids),
        "continues": continues,
        "prompt_token_ids": list(turn.prompt_token_ids[len(before) if continues else 0 :]),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
    }


def _turn_of(row: Mapping[str, Any], before: tuple[int, ...]) -> Turn:
    call = None if row["action"] is None else ToolCall(name=row["action"], arguments=row["action_input"])
    result = None if row["result"] is None else ToolResult(text=row["result"], error=row["tool_error"])
    return Turn(
        role=row["role"],
        prompt_token_ids=(before if row["continues"] else ()) + tuple(row["prompt_token_ids"]),
        completion=Completion(
            token_ids=tuple(row["token_ids"]),
            logprobs=tuple(row["logprobs"]),
            text=row["text"],
            finish_reason=row["finish_reason"],
            policy_version=row["policy_version"],
            switches=tuple(VersionSwitch(index=index, policy_version=version) for index, version in row["switches"]),
        ),
        trainable=row["trainable"],
        grammar=row["grammar"],
        thought=row["thought"],
        tool_call=call,
        tool_result=result,
        format_error=row["format_error"],
        generate_s=row["generate_s"],
        tool_s=row["tool_s"],
    )
