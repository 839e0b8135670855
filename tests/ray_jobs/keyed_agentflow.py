"""`agentflow` with a simulated engine and a simulated learner. Its workers ask the recipe's own tools, which have keys
and quote them. Everything else of a run is real."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))

from configs.run import RunConfig
from envs.tools.toolbox import Toolbox
from envs.types import Task, ToolResult, ToolUnavailableError
from ray_jobs.cli import main
from ray_jobs.run import run
from rollout.types import Group, Trajectory
from tests.changed import replace
from tests.simulated_parts import SimulatedLearner, SimulatedWorker


class KeyedWorker(SimulatedWorker):
    """Every first turn of a trajectory has what the recipe's own tools say when they are asked for their keys."""

    def __init__(self, index: int, config: RunConfig) -> None:
        super().__init__(index)
        self._config = config
        self._said: ToolResult | None = None
        # As the code of a module may do.
        print("printed:", os.environ["UNRELATED_SECRET"])
        print("on stderr:", os.environ["UNRELATED_SECRET"], file=sys.stderr)
        logging.getLogger("own").warning("logged: %s", os.environ["UNRELATED_SECRET"])

    async def run_group(self, task: Task, group_id: str, group_size: int, hints: str = "") -> Group:
        group = await super().run_group(task, group_id, group_size)
        said = self._said = self._said or await self._ask()
        told = [
            replace(one, turns=(replace(one.turns[0], tool_result=said), *one.turns[1:])) for one in group.trajectories
        ]
        return replace(group, trajectories=tuple(told))

    async def attempt(self, task: Task, trajectory_id: str, **options: Any) -> Trajectory:
        return (await self.run_group(task, trajectory_id, 2)).trajectories[0]

    async def _ask(self) -> ToolResult:
        words = []
        with Toolbox(self._config.envs) as toolbox, toolbox.episode() as tools:
            for tool in tools:
                if own := self._config.envs.tools.get(tool.name):
                    try:
                        words.append((await tool.call(own.api_key_env or "")).text)
                    except ToolUnavailableError as error:
                        words.append(str(error))
        return ToolResult(text=" ".join(words), foreign=True)


if __name__ == "__main__":
    run._build_learner = lambda config, model_path: SimulatedLearner(step_s=0.1)
    run._build_worker = lambda config, model_path, index: KeyedWorker(index, config)
    sys.exit(main())
