"""Replay: an episode brought back to a step of its past, so that it can go on from there another way.

The tools run again, so the code tool's session holds the same names; a tool whose answers change from call to
call gives another state than the recorded one.
"""

from collections.abc import Sequence

from rollout.engine import Engine, GenerationRequest
from rollout.types import Completion, Turn


class ReplayEngine:
    """An `Engine` that answers one trajectory's first planner calls from the record, and the rest for real."""

    def __init__(self, engine: Engine, recorded: Sequence[Turn]) -> None:
        self._engine = engine
        self._recorded = [turn.completion for turn in recorded]
        self._next = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        if not request.use_adapter or self._next == len(self._recorded):
            return await self._engine.generate(request)
        self._next += 1
        return self._recorded[self._next - 1]

    def release(self, trajectory_id: str) -> None:
        self._engine.release(trajectory_id)
