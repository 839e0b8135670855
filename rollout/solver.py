"""Attempts at tasks over one engine, whatever it is: what evaluation and `solve` need, and no more."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from configs.rollout import NoMemoryConfig, PlannerAgentConfig
from configs.run import RunConfig
from envs.tools.base_generator import AskModel
from envs.tools.toolbox import Toolbox
from envs.types import Task
from rollout.agent.agent import AnyAgent, TurnListener, build_agent
from rollout.agent.own import OwnAgent, build_own_agent, build_solving
from rollout.chat import Chat, ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import Writer, engine_writers
from rollout.engines.engine import Engine
from rollout.engines.wrappers import SeededEngine
from rollout.memory import EpisodicMemory
from rollout.types import Trajectory

if TYPE_CHECKING:
    from envs.sandbox import SandboxState


class Solver:
    """Owns a toolbox, or the model endpoint of an agent of one's own. More than `max_open` attempts at a time only
    wait; `own_model` asks the frozen base model, where the engine has one."""

    def __init__(
        self, config: RunConfig, engine: Engine, chat: Chat, *, max_open: int, own_model: AskModel | None = None
    ) -> None:
        self._config = config
        self._engine = engine
        self._chat = chat
        self._toolbox: Toolbox | None = None
        self._endpoint = Endpoint()
        if isinstance(config.agent, PlannerAgentConfig):
            self._toolbox = Toolbox(config.envs, own_model=own_model)
        else:
            self._solving = build_solving(config.agent, config.code_path)
        self._memory = None if isinstance(config.memory, NoMemoryConfig) else EpisodicMemory(config.memory)
        self.max_open = max_open

    @property
    def sandbox(self) -> "SandboxState | None":
        """The walls around what the policy's code tool runs; None where it has none."""
        return self._toolbox.sandbox if self._toolbox else None

    def close(self) -> None:
        self._endpoint.close()
        if self._toolbox is not None:
            self._toolbox.close()
        if self._memory is not None:
            self._memory.close()

    async def attempt(
        self,
        task: Task,
        trajectory_id: str,
        *,
        group_id: str,
        temperature: float,
        seed: int,
        on_turn: TurnListener | None = None,
    ) -> Trajectory:
        """One try at a task, with random numbers of its own: what runs beside it does not change them. `on_turn` is
        told of every turn as it happens."""
        agent = self._build_agent(SeededEngine(self._engine, seed), temperature)
        return await agent.run(
            task, trajectory_id=trajectory_id, group_id=group_id, on_turn=on_turn, hints=await self._hints(task)
        )

    async def _hints(self, task: Task) -> str:
        """What an evaluation shows of earlier successes: nothing, unless the recipe asks for it. Raises
        MemoryUnavailableError, because an evaluation that sometimes has hints compares with nothing."""
        if self._memory is None or not self._memory.in_evaluation:
            return ""
        return await self._memory.hints(task)

    def _build_agent(self, engine: Engine, temperature: float) -> AnyAgent:
        if self._toolbox is None:
            return self._build_own_agent(engine_writers(engine, temperature))
        return build_agent(
            self._config,
            engine=engine,
            chat=self._chat,
            tools_for_episode=self._toolbox.episode,
            temperature=temperature,
        )

    def _build_own_agent(self, writer: Callable[[Task, str], Writer]) -> OwnAgent:
        assert isinstance(self._chat, ChatFormat)
        return build_own_agent(self._config, self._solving, self._endpoint, writer=writer, chat=self._chat)
