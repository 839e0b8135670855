"""The run's own base model, without the adapter in training, as something that a tool can ask."""

from itertools import count

from rollout.chat import Chat
from rollout.engine import Engine, GenerationRequest
from rollout.types import Message

SYSTEM = "Answer the question in a few sentences."


class FrozenModel:
    """Asks greedily, each question by itself."""

    def __init__(self, engine: Engine, chat: Chat, max_tokens: int) -> None:
        self._engine = engine
        self._chat = chat
        self._max_tokens = max_tokens
        self._numbers = count()

    async def ask(self, prompt: str) -> str:
        """Raises EngineError when the engine is gone."""
        own_id = f"base_generator/{next(self._numbers)}"
        request = GenerationRequest(
            trajectory_id=own_id,
            prompt_token_ids=self._chat.prompt(SYSTEM, prompt),
            max_tokens=self._max_tokens,
            temperature=0.0,
            use_adapter=False,
            messages=(Message(role="system", content=SYSTEM), Message(role="user", content=prompt)),
        )
        try:
            return (await self._engine.generate(request)).text
        finally:
            self._engine.release(own_id)
