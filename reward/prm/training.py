"""Training of the PRM: least squares on the labels of steps, which are split by task."""

import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from configs.errors import UserError
from learner.packing import split_microbatches
from reward.labels import StepLabel
from reward.prm.decoys import junk_steps, spoilt_steps
from reward.prm.model import ProcessRewardModel
from reward.prm.step_text import StepText, step_texts
from rollout.types import Trajectory

HELD_OUT_SHARE = 0.25
"""Share of the tasks whose steps are not trained on."""
BATCH_TASKS = 4
"""Tasks whose steps make one optimizer step."""
JUNK_SHARE = 0.5
"""Worthless decisions with label 0 in a batch, as a share of its steps."""
SPOILT_SHARE = 0.5
"""Corrupted copies of right steps with label 0 in a batch, as a share of its right steps."""
LEAST_UNLIKE = 0.01
"""Least share of a data set's labels that are not the most frequent one."""
RIGHT = 0.9
"""Steps with at least this label are right, so that a corrupted copy of them is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledStep:
    """A step and the score it should get, in [0, 1]."""

    step: StepText
    label: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrmData:
    """Steps in two halves that share no task."""

    train: tuple[LabelledStep, ...]
    held_out: tuple[LabelledStep, ...]


def prm_data(trajectories: Sequence[Trajectory], labels: Iterable[StepLabel]) -> PrmData:
    """Join steps with their labels and split them by task. Steps without a label are left out.

    Steps of a task with equal texts are trained on once, with their mean label: else a PRM learns little but the first
    steps, which most attempts share.

    Raises UserError if a label belongs to another text than its step has now, or if a half is empty.
    """
    by_place = {(label.trajectory_id, label.step): label for label in labels}
    joined: list[LabelledStep] = []
    for step in (step for trajectory in trajectories for step in step_texts(trajectory)):
        if label := by_place.get((step.trajectory_id, step.step)):
            if label.text_digest != step.digest:
                raise UserError(
                    f"the label of {step.trajectory_id}, step {step.step} was given to another text; label again"
                )
            joined.append(LabelledStep(step=step, label=label.score))
    held_out = held_out_tasks((trajectory.task.id for trajectory in trajectories), share=HELD_OUT_SHARE)
    same = defaultdict[tuple[str, str], list[LabelledStep]](list)
    for labelled in joined:
        if labelled.step.task_id not in held_out:
            same[labelled.step.task_id, labelled.step.digest].append(labelled)
    data = PrmData(
        train=tuple(
            LabelledStep(step=equal[0].step, label=sum(one.label for one in equal) / len(equal))
            for equal in same.values()
        ),
        held_out=tuple(labelled for labelled in joined if labelled.step.task_id in held_out),
    )
    if not data.train or not data.held_out:
        raise UserError(
            f"a PRM needs labelled steps of tasks to train on and of others to be measured on, got {len(data.train)} "
            f"and {len(data.held_out)}; raise collect.num_tasks"
        )
    return data


def check_labels(trajectories: Iterable[Trajectory], labels: Iterable[StepLabel]) -> list[str]:
    """Return warnings for data sets whose labels are nearly all the same. Raises UserError if they are in all."""
    datasets = {trajectory.id: trajectory.task.dataset for trajectory in trajectories}
    counts: defaultdict[str, Counter[float]] = defaultdict(Counter)
    for label in labels:
        if dataset := datasets.get(label.trajectory_id):
            counts[dataset][label.score] += 1
    warnings = []
    for dataset, scores in sorted(counts.items()):
        ((usual, times),), total = scores.most_common(1), scores.total()
        if total - times < LEAST_UNLIKE * total:
            warnings.append(f"{times} of {total} labels of {dataset} are {usual:g}")
    remedy = (
        f"; a PRM learns to tell steps apart if at least {LEAST_UNLIKE:.0%} differ. Where hardly any attempt ends "
        "right, continuations do not either: use label.type='judge' or 'plan', reward.credit.turn_scorer, or more "
        "right demonstrations"
    )
    if warnings and len(warnings) == len(counts):
        raise UserError("; ".join(warnings) + remedy)
    return [f"warning: {warning}{remedy}" for warning in warnings]


def held_out_tasks(task_ids: Iterable[str], *, share: float) -> set[str]:
    """Return `share` of the tasks, at least one, by the hash of their id: the same for every labeller and seed."""
    ordered = sorted(set(task_ids), key=lambda task_id: hashlib.sha256(f"prm:{task_id}".encode()).digest())
    return set(ordered[: max(1, round(share * len(ordered)))])


def train_prm(prm: ProcessRewardModel, steps: Sequence[LabelledStep], *, seed: int) -> Iterator[float]:
    """Minimise the mean squared error of the score; yield the loss of every optimizer step.

    The learning rate falls linearly to zero. Raises UserError if a gradient is not finite.
    """
    config = prm.config
    optimizer = torch.optim.AdamW(prm.trainable_parameters(), weight_decay=0.0)
    batches = [batch for epoch in range(config.num_epochs) for batch in _batches(steps, seed=f"{seed}|{epoch}")]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / len(batches))
    for batch in batches:
        rows = prm.rows([labelled.step for labelled in batch])
        total = 0.0
        for microbatch in split_microbatches(rows, config.microbatch_tokens):
            labels = prm.backbone.tensor(np.array([batch[row.index].label for row in microbatch], dtype=np.float32))
            loss = (prm.predict(microbatch) - labels).square().sum() / len(rows)
            loss.backward()
            total += float(loss.detach())
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        if not math.isfinite(norm):
            raise UserError(f"the PRM's gradient must be finite, it is {norm}; lower prm.learning_rate")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        yield total


def num_batches(steps: Sequence[LabelledStep], *, num_epochs: int) -> int:
    """Return the number of optimizer steps that `train_prm` takes."""
    return num_epochs * -(-len({labelled.step.task_id for labelled in steps}) // BATCH_TASKS)


def _batches(steps: Sequence[LabelledStep], *, seed: str) -> Iterator[list[LabelledStep]]:
    rng = random.Random(f"prm|{seed}")
    by_task: defaultdict[str, list[LabelledStep]] = defaultdict(list)
    for labelled in steps:
        by_task[labelled.step.task_id].append(labelled)
    order = sorted(by_task)
    rng.shuffle(order)
    for start in range(0, len(order), BATCH_TASKS):
        batch = [labelled for task_id in order[start : start + BATCH_TASKS] for labelled in by_task[task_id]]
        draw = rng.randrange(2**31)
        proposed, right = [one.step for one in batch], [one.step for one in batch if one.label >= RIGHT]
        junk = junk_steps(proposed, share=JUNK_SHARE, seed=draw)
        spoilt = spoilt_steps(right, share=SPOILT_SHARE, seed=draw)
        yield batch + [LabelledStep(step=step, label=0.0) for step in (*junk, *spoilt)]
