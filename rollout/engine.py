"""What the agent asks of an inference engine: prompts to completions, and the adapter to sample with."""

from dataclasses import dataclass
from typing import Protocol

from rollout.types import Completion

BASE_VERSION = -1
"""The policy version of the untouched base model."""


class EngineError(RuntimeError):
    """The engine cannot serve any more; the trajectory that met it is unscorable, not wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One model call of a trajectory. `grammar` is EBNF source; `use_adapter` False asks the frozen base."""

    trajectory_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    grammar: str | None = None
    use_adapter: bool = True


class Engine(Protocol):
    @property
    def policy_version(self) -> int: ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion. Raises EngineError when the engine is gone."""
        ...

    def release(self, trajectory_id: str) -> None:
        """This trajectory asks nothing more; what it still has open is dropped."""
        ...

    async def load_adapter(self, version: int, adapter: bytes) -> str:
        """Sample with this adapter from now on; return the digest of the bytes that were loaded."""
        ...
