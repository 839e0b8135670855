"""The generator: writes the final answer once the steps are over. Never trained."""

from typing import Protocol

from envs.types import Task
from rollout.chat import Chat
from rollout.engine import Engine, GenerationRequest
from rollout.memory import Memory
from rollout.types import Turn

_SYSTEM = "Give the final answer to the task from the steps below. Write the answer alone."


class Generator(Protocol):
    async def answer(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[str | None, Turn | None]:
        """The final answer (None: there is none), and the model call behind it where there was one."""
        ...


class RuleGenerator:
    """Takes over what the planner answered; without an answer step there is no answer."""

    async def answer(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[str | None, Turn | None]:
        last = memory.entries[-1].call if memory.entries else None
        return (last.arguments if last and last.name == "answer" else None), None


class ModelGenerator:
    """Asks the frozen base model to write the answer from memory."""

    def __init__(self, engine: Engine, chat: Chat, max_tokens: int) -> None:
        self._engine = engine
        self._chat = chat
        self._max_tokens = max_tokens

    async def answer(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[str | None, Turn | None]:
        prompt = self._chat.prompt(_SYSTEM, f"Task: {task.question}\n{memory.render()}")
        completion = await self._engine.generate(
            GenerationRequest(
                trajectory_id=trajectory_id,
                prompt_token_ids=prompt,
                max_tokens=self._max_tokens,
                temperature=0.0,
                use_adapter=False,
            )
        )
        turn = Turn(role="generator", prompt_token_ids=prompt, completion=completion, trainable=False)
        return completion.text.strip() or None, turn
