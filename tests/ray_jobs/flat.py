"""Trajectories from the flat records that the report shows."""

from typing import get_args

from envs.types import Task, ToolCall, ToolResult
from rollout.types import Completion, GroupCredit, Reward, Role, Spread, StopReason, Trajectory, Turn

NOTHING = Spread(num=0, mean=0.0, std=0.0)
CREDIT = GroupCredit(scheme="outcome_gated", weight=0.5, totals=NOTHING, scores=NOTHING, by_action={})


def turn_from(flat):
    call, result = flat.get("action"), flat.get("result")
    return Turn.of(
        role=flat["role"] if flat["role"] in get_args(Role) else "planner",
        prompt_token_ids=(),
        completion=Completion(
            token_ids=(), logprobs=(), text=flat.get("text", ""), finish_reason="stop", policy_version=1
        ),
        trainable=True,
        thought=flat.get("thought") or "",
        tool_call=None if call is None else ToolCall(name=call, arguments=flat.get("action_input") or ""),
        tool_result=None if result is None else ToolResult(text=result, error=flat.get("tool_error")),
        format_error=flat.get("format_error"),
    )


def trajectory_from(flat):
    turns = tuple(map(turn_from, flat["turns"]))
    planned = [turn for turn in turns if turn.role == "planner"]
    for name, field in (("prm_scores", "score"), ("advantages", "advantage"), ("same_steps", "same_steps")):
        for turn, value in zip(planned, flat.get(name) or (), strict=False):
            setattr(turn, field, tuple(value) if field == "same_steps" else value)
    reward = flat["reward"]
    return Trajectory(
        id=flat.get("id", "t"),
        group_id=flat.get("group_id", "g"),
        task=Task(id=flat.get("task_id", "t"), dataset="d", question=flat["question"], answer=flat["gold"]),
        turns=turns,
        answer=flat["answer"],
        stop_reason=flat["stop_reason"] if flat["stop_reason"] in get_args(StopReason) else "answered",
        reward=Reward(outcome=flat.get("outcome", reward), total=reward),
        phase=flat.get("phase", "train"),
        step=flat.get("step"),
        prm_digest="d" if "prm_scores" in flat else None,
        credit=CREDIT if "advantages" in flat else None,
    )
