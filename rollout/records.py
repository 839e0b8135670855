"""Trajectories as JSON lines, for reading why a step got its reward."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.types import Trajectory, Turn


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
        "turns": [_turn_record(turn) for turn in trajectory.turns],
    }


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line that was cut off by a crash is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def _turn_record(turn: Turn) -> dict[str, Any]:
    call, result, completion = turn.tool_call, turn.tool_result, turn.completion
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
        "prompt_tokens": len(turn.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": [round(logprob, 4) for logprob in completion.logprobs],
    }
