"""Demonstrations for the cold start: planned decisions, played through the real agent and its tools.

The agent cannot tell them from a policy's, so a demonstration has exactly the context that the policy will
act in.
"""

import random
from collections.abc import Sequence

from envs.datasets.generated import GeneratedTask, PlanStep, wrong_plan
from rollout.chat import ChatFormat
from rollout.decision import Decision
from rollout.engine import EngineError, GenerationRequest
from rollout.types import Completion


def demonstrated_plans(tasks: Sequence[GeneratedTask], wrong_share: float, *, seed: int) -> list[tuple[PlanStep, ...]]:
    """Each task's plan, a share of them replaced by plausible wrong ones. Which, and how they go wrong, the seed
    decides."""
    chosen = random.Random(f"demonstrations|{seed}").sample(range(len(tasks)), round(wrong_share * len(tasks)))
    wrong = set(chosen)
    return [
        wrong_plan(one, random.Random(f"wrong plan|{seed}|{index}")) if index in wrong else one.plan
        for index, one in enumerate(tasks)
    ]


class DemonstrationEngine:
    """An `Engine` that writes one trajectory's planned decisions, one per call."""

    def __init__(self, chat: ChatFormat, plan: Sequence[PlanStep]) -> None:
        self._chat = chat
        self._steps = iter(plan)

    async def generate(self, request: GenerationRequest) -> Completion:
        step = next(self._steps, None)
        if step is None:
            raise EngineError("the demonstration has no further step, but the agent asked for one")
        text = Decision(thought=step.thought, action=step.action, action_input=step.action_input).to_json()
        token_ids = self._chat.encode_completion(text)
        return Completion(
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            text=text,
            finish_reason="stop",
            policy_version=0,
        )

    def release(self, trajectory_id: str) -> None:
        pass
