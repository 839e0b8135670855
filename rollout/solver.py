"""Acting greedily over one engine, whatever it is: what evaluation and `solve` need, and no more."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.rollout import NoMemoryConfig
from configs.run import RunConfig
from envs.tools.base_generator import AskModel
from envs.tools.toolbox import Toolbox
from envs.types import Task
from rollout.agent.agent import Agent, TurnListener, build_agent
from rollout.chat import Chat
from rollout.engines.engine import Engine
from rollout.engines.wrappers import SeededEngine
from rollout.memory.episodic import EpisodicMemory
from rollout.types import Trajectory

if TYPE_CHECKING:
    from envs.sandbox import SandboxState


class Solver:
    """Owns a toolbox. At most `max_open` trajectories of an evaluation run at a time; `own_model` asks the frozen base
    model, where the engine has one."""

    def __init__(
        self, config: RunConfig, engine: Engine, chat: Chat, *, max_open: int, own_model: AskModel | None = None
    ) -> None:
        self._config = config
        self._engine = engine
        self._chat = chat
        self._toolbox = Toolbox(config.envs, own_model=own_model)
        self._memory = None if isinstance(config.memory, NoMemoryConfig) else EpisodicMemory(config.memory)
        self.max_open = max_open
        self._greedy_agent = self._build_agent(engine, 0.0)

    @property
    def sandbox(self) -> "SandboxState | None":
        """The walls around what the policy's code tool runs; None where it has none."""
        return self._toolbox.sandbox

    def close(self) -> None:
        self._toolbox.close()
        if self._memory is not None:
            self._memory.close()

    async def evaluate(self, tasks: Sequence[Task], phase: str) -> list[Trajectory]:
        """Greedy, one trajectory per task."""
        places = asyncio.Semaphore(self.max_open)

        async def run(task: Task) -> Trajectory:
            async with places:
                hints = await self._hints(task)
                return await self._greedy_agent.run(
                    task, trajectory_id=f"{phase}/{task.id}", group_id=phase, hints=hints
                )

        return list(await asyncio.gather(*(run(task) for task in tasks)))

    async def solve(self, task: Task, on_turn: TurnListener) -> Trajectory:
        """Greedy, with every turn reported as it happens."""
        return await self._greedy_agent.run(
            task, trajectory_id=task.id, group_id="solve", on_turn=on_turn, hints=await self._hints(task)
        )

    async def attempt(self, task: Task, trajectory_id: str, *, temperature: float, seed: int) -> Trajectory:
        """One try at a task, with random numbers of its own: what runs beside it does not change them."""
        agent = self._build_agent(SeededEngine(self._engine, seed), temperature)
        return await agent.run(
            task, trajectory_id=trajectory_id, group_id=f"seed {seed}", hints=await self._hints(task)
        )

    async def _hints(self, task: Task) -> str:
        """What an evaluation shows of earlier successes: nothing, unless the recipe asks for it. Raises
        MemoryUnavailableError, because an evaluation that sometimes has hints compares with nothing."""
        if self._memory is None or not self._memory.in_evaluation:
            return ""
        return await self._memory.hints(task)

    def _build_agent(self, engine: Engine, temperature: float) -> Agent:
        return build_agent(
            self._config,
            engine=engine,
            chat=self._chat,
            tools_for_episode=self._toolbox.episode,
            temperature=temperature,
        )
