"""The verifier: after each step, is what memory holds enough to answer? Never trained."""

from typing import Literal, Protocol

from envs.types import Task
from rollout.chat import Chat
from rollout.engine import Engine, GenerationRequest
from rollout.memory import Memory
from rollout.types import Turn

Verdict = Literal["continue", "stop"]
_GRAMMAR = 'root ::= "continue" | "stop"'
_SYSTEM = "You check the work of an agent. Say stop if the steps so far suffice to answer the task, else continue."


class Verifier(Protocol):
    async def verify(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[Verdict, Turn | None]:
        """The verdict, and the model call behind it where there was one."""
        ...


class RuleVerifier:
    """Continues until the planner answers."""

    async def verify(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[Verdict, Turn | None]:
        answered = bool(memory.entries) and memory.entries[-1].call.name == "answer"
        return ("stop" if answered else "continue"), None


class ModelVerifier:
    """Asks the frozen base model, never the trained adapter."""

    def __init__(self, engine: Engine, chat: Chat, max_tokens: int) -> None:
        self._engine = engine
        self._chat = chat
        self._max_tokens = max_tokens

    async def verify(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[Verdict, Turn | None]:
        prompt = self._chat.prompt(_SYSTEM, f"Task: {task.question}\n{memory.render()}")
        completion = await self._engine.generate(
            GenerationRequest(
                trajectory_id=trajectory_id,
                prompt_token_ids=prompt,
                max_tokens=self._max_tokens,
                temperature=0.0,
                grammar=_GRAMMAR,
                use_adapter=False,
            )
        )
        turn = Turn(role="verifier", prompt_token_ids=prompt, completion=completion, trainable=False)
        return ("stop" if completion.text == "stop" else "continue"), turn
