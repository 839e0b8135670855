"""Label the steps of collected trajectories; what is labelled already is not labelled, or paid for, again."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from configs.reward import LabelConfig
from reward.judge import StepJudge
from reward.labels import LabelError, Labeller, StepLabel, append_label, read_labels
from reward.monte_carlo import ContinueFrom, MonteCarloLabeller
from reward.plan_labels import PlanLabeller
from reward.prm_quality import agreement
from reward.prm_training import held_out_tasks
from reward.step_text import StepText, step_texts
from rollout.types import Trajectory

MAX_OPEN_STEPS = 24
MAX_FAILURES_IN_A_ROW = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelling:
    """All labels that one labeller has given so far, and the steps that it could not label in this pass."""

    labels: tuple[StepLabel, ...]
    failures: tuple[str, ...]


class LabellingStoppedError(RuntimeError):
    """So many steps in a row got no label that the cause is not the steps; the message holds the last reason."""


def labelling_passes(
    config: LabelConfig, collected: Sequence[Trajectory], *, continue_from: ContinueFrom, receipts: Path
) -> list[tuple[Labeller, list[StepText]]]:
    """Who labels what: the recipe's labeller every step, and where the recipe wants a second opinion, Monte-Carlo
    the steps of a share of the tasks."""
    steps = [step for trajectory in collected for step in step_texts(trajectory)]
    monte_carlo = MonteCarloLabeller(collected, continue_from, continuations=config.continuations)
    if config.labeller == "monte_carlo":
        return [(monte_carlo, steps)]
    main: Labeller = PlanLabeller(collected) if config.labeller == "plan" else _build_judge(config, receipts)
    if not config.check_share:
        return [(main, steps)]
    checked = held_out_tasks((step.task_id for step in steps), share=config.check_share)
    return [(main, steps), (monte_carlo, [step for step in steps if step.task_id in checked])]


def split_checks(config: LabelConfig, labels: Iterable[StepLabel]) -> tuple[list[StepLabel], list[StepLabel]]:
    """The main labeller's labels, and those of the second opinion."""
    sides: tuple[list[StepLabel], list[StepLabel]] = ([], [])
    for label in labels:
        second = label.labeller == MonteCarloLabeller.name and config.labeller != "monte_carlo"
        sides[second].append(label)
    return sides


def label_agreement(config: LabelConfig, main: Sequence[StepLabel], checks: Sequence[StepLabel]) -> dict[str, Any]:
    """How far the labeller and the second opinion say the same of the same steps; empty without one."""
    if not checks:
        return {}
    scores, others = (
        {(one.task_id, one.trajectory_id, one.step): one.score for one in side} for side in (main, checks)
    )
    return {f"{config.labeller}_and_monte_carlo": agreement(scores, others, task_of=itemgetter(0))}


def _build_judge(config: LabelConfig, receipts: Path) -> StepJudge:
    assert config.judge is not None
    return StepJudge(config.judge, receipts=receipts)


async def label_steps(
    steps: Sequence[StepText], labeller: Labeller, path: Path, on_step: Callable[[], None]
) -> Labelling:
    """Label every step that `path` has no label of this labeller for, several side by side.

    A step without an honest verdict is reported and left out, to be tried in the next pass. What ends the whole
    pass (a spent budget, a refused key, MAX_FAILURES_IN_A_ROW) is raised after all that was begun is on disk.
    The labeller is closed in any case.
    """
    work = _Pass(steps, labeller, path, on_step)
    try:
        await asyncio.gather(*(work.run() for _ in range(MAX_OPEN_STEPS)))
    finally:
        await labeller.close()
    if work.stopped_by is not None:
        raise work.stopped_by
    return Labelling(labels=tuple(work.known.values()), failures=tuple(work.failures))


class _Pass:
    """One pass over the steps, shared by its runners. After a stop nothing new is begun, and what was begun ends:
    its label may be paid for."""

    def __init__(self, steps: Sequence[StepText], labeller: Labeller, path: Path, on_step: Callable[[], None]) -> None:
        own = (label for label in read_labels(path) if label.labeller == labeller.name)
        self.known = {(label.text_digest, label.trajectory_id, label.step): label for label in own}
        self.failures: list[str] = []
        self.stopped_by: Exception | None = None
        self._steps = iter(steps)
        self._labeller = labeller
        self._path = path
        self._on_step = on_step
        self._failures_in_a_row = 0

    async def run(self) -> None:
        for step in self._steps:
            if self.stopped_by is not None:
                return
            if (step.digest, step.trajectory_id, step.step) not in self.known:
                await self._label(step)
            self._on_step()

    async def _label(self, step: StepText) -> None:
        try:
            label = await self._labeller.label(step)
        except LabelError as error:
            self._fail(error)
            return
        except Exception as error:
            self.stopped_by = self.stopped_by or error
            return
        try:
            append_label(self._path, label)
        except OSError as error:
            self.stopped_by = self.stopped_by or LabellingStoppedError(
                f"cannot write {self._path}: {error.strerror}; free some space there; labels so far are kept"
            )
        else:
            self.known[step.digest, step.trajectory_id, step.step] = label
            self._failures_in_a_row = 0

    def _fail(self, error: LabelError) -> None:
        self.failures.append(str(error))
        self._failures_in_a_row += 1
        if self._failures_in_a_row == MAX_FAILURES_IN_A_ROW:
            self.stopped_by = self.stopped_by or LabellingStoppedError(
                f"{MAX_FAILURES_IN_A_ROW} steps in a row got no label from {self._labeller.name}, the last because: "
                f"{error}; labels so far are kept"
            )
