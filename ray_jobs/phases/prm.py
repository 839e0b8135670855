"""The process reward model (PRM) of a run: its training, its quality on held-out tasks, and its canaries."""

import math
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import ray

from actors.cluster import PART_LOST
from configs.errors import UserError
from configs.run import RunConfig
from ray_jobs.phases.label import labeller_name, labels_of, read_collected
from ray_jobs.run.folder import locked, write_json
from ray_jobs.run.local import LocalRun
from reward.labels import StepLabel, read_labels
from reward.prm.quality import evaluate_prm
from reward.prm.step_text import StepText, step_texts
from reward.prm.training import num_batches, prm_data
from rollout.types import Group, Trajectory

if TYPE_CHECKING:
    from ray_jobs.run.run import Run


def learn_prm(run: "Run | LocalRun", collected: Sequence[Trajectory], labels: Sequence[StepLabel]) -> None:
    """Train the PRM on the tasks that are not held out, save it, and write down its quality on the others."""
    if run.finished("train_prm") is not None:
        run.prm.load(run.folder.prm)
        return
    data = prm_data(collected, labels_of(run.config.label, labels))
    total, prm = num_batches(data.train, num_epochs=run.config.prm.num_epochs), run.prm
    with run.phase("train_prm", total=total) as phase:
        for step, loss in enumerate(prm.train(data.train)):
            run.log_metrics(step, {"train_prm/loss": loss})
            phase.advance(loss=loss)
        digest = prm.save(run.folder.prm, {"num_steps": len(data.train)})
        quality = evaluate_prm(data, collected, score=prm.score, seed=run.config.seed)
        write_json(run.folder.quality, quality | {"digest": digest})
        phase.facts.update(digest=digest, num_steps=len(data.train))
    spearman, auroc = (_number(quality[name]) for name in ("spearman_within_group", "auroc_outcome"))
    highest = _number(_highest(quality["canaries"].values()))
    run.console.note(
        f"PRM on held-out tasks: Spearman within group {spearman}, AUROC of the outcome {auroc}, highest canary "
        f"{highest}"
    )


def run_train_prm(config: RunConfig) -> None:
    """Train the PRM on `collected/` and `labels.jsonl` of the run folder; write `prm/` and `prm_quality.json` there.

    Raises UserError without trajectories or labels, or if another process works on the run.
    """
    with LocalRun(config) as run:
        folder = run.folder
        collected, labels = read_collected(folder.path), list(read_labels(folder.labels))
        if not labels_of(config.label, labels):
            raise UserError(
                f"'{folder.labels}' holds no labels of {labeller_name(config.label)}; run `agentflow label` with the "
                "same label settings first"
            )
        with locked(folder.path):
            learn_prm(run, collected, labels)
    use_it = shlex.quote(f"reward.credit.prm_path={folder.prm}")
    run.console.note(f"PRM: {folder.prm}; use it with {use_it}")
    run.console.note(f"quality: {folder.quality}")


def watch_prm(run: "Run", groups: Iterable[Group], step: int, prm_weight: float) -> dict[str, float]:
    """Return metrics for the alarms: the weight of step scores and, once a window, the PRM's highest score of junk.

    The junk decisions are scored in a context of each group of the batch that the PRM scored. Without a PRM, and
    between windows, no group is read.
    """
    if (prm := run.supervisor.prm) is None or run.config.reward.prm is None:
        return {"prm/weight": prm_weight} if run.config.reward.turn_scorer else {}
    metrics = {"prm/weight": prm_weight}
    if step % run.config.reward.prm.alarm_window == 0:
        firsts: list[StepText] = []
        for group in groups:
            scored = (step_texts(attempt) for attempt in group.trajectories if attempt.prm_digest is not None)
            firsts += next((steps[:1] for steps in scored if steps), ())
        # A PRM that was lost is being restarted; its canaries wait for the next window.
        with suppress(*PART_LOST):
            found = ray.get([prm.score_canaries.remote(first) for first in firsts])
            worst = _highest(score for scores in found for score in scores.values())
            metrics |= {} if worst is None else {"prm/canary_max": worst}
    return metrics


def _highest(scores: Iterable[float | None]) -> float | None:
    return max((score for score in scores if score is not None), default=None)


def _number(value: float | None) -> str:
    return "not defined" if value is None or not math.isfinite(value) else f"{value:.2f}"
