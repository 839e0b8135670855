"""What the RL loop asks of its process reward model: whether it still sees through junk."""

import json
from collections.abc import Iterable
from contextlib import suppress

import ray

from ray_jobs.phases.train_prm import highest
from ray_jobs.run.run import Run
from reward.prm.step_text import step_texts
from reward.stored import StoredGroup
from rollout.records import trajectory_of


def watch_prm(run: Run, payloads: Iterable[bytes], step: int, prm_weight: float) -> dict[str, float]:
    """Metrics for the alarms: the weight of step scores and, once a window, the PRM's highest score of junk decisions
    in a context of each of the batch's groups that it scored. Without a PRM, and between windows, no group is read."""
    if run.actors.prm is None or run.config.reward.prm is None:
        return {"prm/weight": prm_weight} if run.config.reward.turn_scorer else {}
    metrics = {"prm/weight": prm_weight}
    if step % run.config.reward.prm.alarms.window == 0:
        scored = (group for group in map(StoredGroup.of, payloads) if group.step_scores is not None)
        firsts = [step_texts(trajectory_of(json.loads(group.lines[0])))[0] for group in scored]
        # A PRM that died is being started again; its canaries wait for the next window.
        with suppress(ray.exceptions.RayActorError):
            found = ray.get([run.actors.prm.score_canaries.remote(first) for first in firsts])
            worst = highest(score for scores in found for score in scores.values())
            metrics |= {} if worst is None else {"prm/canary_max": worst}
    return metrics
