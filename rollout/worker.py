"""The rollout worker's work, without Ray: groups, demonstrations and evaluations on one engine."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from configs.run import RunConfig
from envs.datasets.generated import GeneratedTask, wrong_plan
from envs.tools.toolbox import Toolbox
from envs.types import Task
from rollout.agent import Agent, TurnListener
from rollout.building import build_agent, build_chat
from rollout.demonstrations import DemonstrationEngine
from rollout.engine import Engine
from rollout.group import run_group
from rollout.lockstep import LockstepEngine
from rollout.replay import ReplayEngine
from rollout.types import Trajectory, TrajectoryGroup
from rollout.vllm_engine import VllmEngine


class Worker:
    """Owns an engine and a toolbox. At depth 0 groups may run in lockstep, which makes them reproducible."""

    def __init__(self, config: RunConfig, model_path: Path, *, index: int) -> None:
        self._config = config
        self.engine = VllmEngine(model_path, config.rollout.engine, config.model, seed=config.seed + index)
        self._chat = build_chat(model_path)
        self._toolbox = Toolbox(config.envs)
        in_lockstep = config.pipeline_depth == 0 and config.rollout.lockstep
        self._lockstep = LockstepEngine(self.engine, seed=config.seed) if in_lockstep else None
        self._agent = self._build_agent(self._lockstep or self.engine, config.rollout.temperature)
        self._greedy_agent = self._build_agent(self.engine, 0.0)

    def close(self) -> None:
        self.engine.close()
        self._toolbox.close()

    def begin_round(self, num_groups: int) -> None:
        """Exactly so many groups run next; in lockstep, if at all."""
        if self._lockstep is not None:
            self._lockstep.begin_round(num_groups * self._config.rollout.group_size)

    async def run_group(self, task: Task, group_id: str, group_size: int) -> TrajectoryGroup:
        return await run_group(self._agent, task, group_id=group_id, group_size=group_size)

    async def collect_group(self, task: Task, group_id: str, group_size: int) -> TrajectoryGroup:
        """A group outside of training, at the temperature of collecting."""
        agent = self._build_agent(self.engine, self._config.collect.temperature)
        return await run_group(agent, task, group_id=group_id, group_size=group_size)

    async def continue_from(self, trajectory: Trajectory, num_turns: int, count: int) -> list[Trajectory]:
        """`count` new ends of a trajectory after its first `num_turns` planner turns, sampled as in training."""
        recorded = trajectory.planner_turns[:num_turns]

        def run(index: int) -> Coroutine[Any, Any, Trajectory]:
            agent = self._build_agent(ReplayEngine(self.engine, recorded), self._config.rollout.temperature)
            own_id = f"{trajectory.id}+{num_turns}/{index}"
            return agent.run(trajectory.task, trajectory_id=own_id, group_id=trajectory.group_id)

        return list(await asyncio.gather(*map(run, range(count))))

    async def evaluate(self, tasks: Sequence[Task], phase: str) -> list[Trajectory]:
        """Greedy, one trajectory per task."""
        places = asyncio.Semaphore(2 * self._config.rollout.engine.max_num_seqs)

        async def run(task: Task) -> Trajectory:
            async with places:
                return await self._greedy_agent.run(task, trajectory_id=f"{phase}/{task.id}", group_id=phase)

        return list(await asyncio.gather(*(run(task) for task in tasks)))

    async def solve(self, task: Task, on_turn: TurnListener) -> Trajectory:
        """Greedy, with every turn reported as it happens."""
        return await self._greedy_agent.run(task, trajectory_id=task.id, group_id="solve", on_turn=on_turn)

    async def demonstrate(self, tasks: Sequence[GeneratedTask], wrong_share: float) -> list[Trajectory]:
        """Play each task's plan, a share of them replaced by plausible wrong ones, through the real tools."""
        rng = random.Random(f"demonstrations|{self._config.seed}")
        num_wrong = round(wrong_share * len(tasks))
        wrong = set(rng.sample(range(len(tasks)), num_wrong))
        places = asyncio.Semaphore(8)

        async def play(index: int, generated: GeneratedTask) -> Trajectory:
            plan = wrong_plan(generated, random.Random(index)) if index in wrong else generated.plan
            agent = self._build_agent(DemonstrationEngine(self._chat, plan), 1.0)
            async with places:
                return await agent.run(
                    generated.task, trajectory_id=f"demonstration/{index}", group_id="demonstrations"
                )

        return list(await asyncio.gather(*(play(index, one) for index, one in enumerate(tasks))))

    def _build_agent(self, engine: Engine, temperature: float) -> Agent:
        return build_agent(
            self._config,
            engine=engine,
            chat=self._chat,
            tools_for_episode=self._toolbox.episode,
            temperature=temperature,
        )
