"""`agentflow` with a simulated engine and a simulated learner; everything else of a run is real."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path.cwd()))

from envs.types import Task
from ray_jobs.cli import main
from ray_jobs.run import run
from rollout.types import Trajectory
from tests.simulated_parts import SimulatedLearner, SimulatedWorker

STEP_S = 0.5


class ScriptedWorker(SimulatedWorker):
    async def attempt(self, task: Task, trajectory_id: str, **options: Any) -> Trajectory:
        return (await self.run_group(task, trajectory_id, 2)).trajectories[0]


if __name__ == "__main__":
    run._build_learner = lambda config, model_path: SimulatedLearner(step_s=STEP_S)
    run._build_worker = lambda config, model_path, index: ScriptedWorker(index)
    sys.exit(main())
