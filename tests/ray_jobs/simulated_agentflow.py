"""`agentflow` with a simulated engine and a simulated learner; everything else of a run is real."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path.cwd()))

from benchmarks.simulated_parts import SimulatedLearner, SimulatedWorker
from envs.types import Task
from ray_jobs.cli import main
from ray_jobs.run import actors as cast
from rollout.types import Trajectory

STEP_S = 0.5


class ScriptedWorker(SimulatedWorker):
    async def evaluate(self, tasks: Sequence[Task], phase: str) -> list[Trajectory]:
        return [(await self.run_group(task, f"{phase}/{task.id}", 2)).trajectories[0] for task in tasks]


if __name__ == "__main__":
    cast._build_learner = lambda config, model_path: SimulatedLearner(step_s=STEP_S)
    cast._build_worker = lambda config, model_path, index: ScriptedWorker(index)
    sys.exit(main())
