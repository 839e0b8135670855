"""A run with simulated parts as a process of its own: `python play.py FOLDER [overrides]` begins it or goes on."""

import sys
from functools import partial
from pathlib import Path

from doubles import RememberingLearner, RoundWorker, WatchedWorker
from stage import local_ray, make_config, open_stage

from ray_jobs.train import reinforce
from tests.simulated_parts import GroupShape, SimulatedLearner

MIXED = GroupShape(shares={"signal": 0.6, "all_right": 0.2, "all_wrong": 0.2})
"""Some tasks are trained, some filtered; which, their names decide."""


def main() -> None:
    folder = Path(sys.argv[1])
    config = make_config(folder, *sys.argv[2:])
    in_rounds = config.pipeline_depth == 0
    build_worker = partial(RoundWorker if in_rounds else WatchedWorker, folder=folder, shape=MIXED)
    build_learner = RememberingLearner if in_rounds else SimulatedLearner
    with local_ray(), open_stage(config, build_worker=build_worker, build_learner=build_learner) as stage:
        reinforce(stage.run)


if __name__ == "__main__":
    main()
