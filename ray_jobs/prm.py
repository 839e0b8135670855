"""The process reward model (PRM): collected trajectories, labels of their steps, and its training."""

import asyncio
import random
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import UserError
from configs.reward import JudgeLabelConfig, LabelConfig, MonteCarloLabelConfig
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.tools.function_tool import own_descriptions
from envs.types import Task
from ray_jobs.held_out import side_by_side
from ray_jobs.run.folder import locked, write_json
from ray_jobs.run.local import LocalRun
from ray_jobs.run.preflight import check_judge_key, check_labelling
from ray_jobs.run.task_checks import prm_tasks
from ray_jobs.viewer.pages import shown
from reward.labels import (
    LabelError,
    Labeller,
    MonteCarloLabeller,
    StepLabel,
    VotesDisagreeError,
    append_label,
    read_labels,
)
from reward.labels.judge import CUSTOM_AGENT_RUBRIC, StepJudge, judge_name, planner_rubric
from reward.labels.plan import PlanLabeller
from reward.labels.search import Search, labels_as_scores
from reward.prm.quality import evaluate_prm
from reward.prm.step_text import StepText, step_texts
from reward.prm.training import HELD_OUT_SHARE, check_labels, held_out_tasks, num_batches, prm_data
from reward.scorers import outcomes_of
from rollout.codec import SchemaError, group_line, group_of
from rollout.files import append_line, read_json, whole_lines
from rollout.filters import SOLVED
from rollout.types import Group, Reward, Trajectory

if TYPE_CHECKING:
    from ray_jobs.run.run import Run

MAX_OPEN_GROUPS = 24


class CollectedGroups:
    """A folder with a file of groups, one a line: a group is there whole or not at all, whenever a process ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "groups.jsonl"
        self.group_ids = {group.id for group in self.groups()}

    async def add(self, group: Group) -> None:
        """Score and write a group. One that has no attempt to score is left out, so that it is collected again."""
        if group.id in self.group_ids or all(one.stop_reason == "infrastructure" for one in group.trajectories):
            return
        outcomes = await outcomes_of(group.trajectories)
        for trajectory, outcome in zip(group.trajectories, outcomes, strict=True):
            trajectory.phase, trajectory.reward = "collect", Reward(outcome=outcome, total=outcome)
        append_line(self._path, group_line(group))
        self.group_ids.add(group.id)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield every trajectory, in the order of the file."""
        for group in self.groups():
            yield from group.trajectories

    def groups(self) -> Iterator[Group]:
        """Yield every group, in the order of the file. Raises UserError for another schema."""
        for line in whole_lines(self._path) if self._path.exists() else ():
            try:
                yield group_of(line)
            except SchemaError as error:
                raise UserError(f"{self._path}: {error}; collect again") from error


def prepare_prm(run: "Run | LocalRun") -> None:
    """Collect trajectories, label their steps, and train the PRM; what is done already is not repeated."""
    collected = collect(run)
    label(run, collected)
    if isinstance(run.config.label, JudgeLabelConfig):  # other labels are of executed steps, and not of candidates
        collected += deepen(run, collected)
    learn_prm(run, collected)


def collect(run: "Run | LocalRun") -> list[Trajectory]:
    """Return trajectories of the current policy on training tasks; those in the run folder are not collected again.

    There is one group per task, which is written as soon as it is complete.
    """
    store = CollectedGroups(run.folder.collected)
    if run.finished("collect") is not None:
        return list(store.trajectories())
    tasks, collect_group = prm_tasks(run.config), run.rollouts.collect_group
    with run.phase("collect", total=len(tasks)) as phase:

        async def collect_one(task: Task) -> None:
            group_id = f"collect/{task.id}"
            if group_id not in store.group_ids:
                await store.add(await collect_group(task, group_id, run.config.collect.rollouts_per_task))
            phase.advance()

        asyncio.run(side_by_side(tasks, collect_one, limit=MAX_OPEN_GROUPS))
        collected = list(store.trajectories())
        phase.facts.update(
            num_tasks=len({trajectory.task.id for trajectory in collected}),
            num_trajectories=len(collected),
            num_steps=sum(len(trajectory.planner_turns) for trajectory in collected),
            num_malformed=sum(trajectory.num_format_errors for trajectory in collected),
            num_right=sum(trajectory.outcome == SOLVED for trajectory in collected),
        )
    counts = ", ".join(f"{name.removeprefix('num_')} {count}" for name, count in phase.facts.items())
    run.console.note(f"collected: {counts}")
    return collected


def _keep_policy(run: LocalRun) -> None:
    """Write down the policy before the first trajectory, and check that later ones are sampled with the same."""
    settings, file = run.config.collect, run.folder.collected / "policy.json"
    policy = {
        **run.policy,
        "collect.temperature": settings.temperature,
        "collect.rollouts_per_task": settings.rollouts_per_task,
    }
    if file.exists():
        recorded = read_json(file)
        if changed := [name for name, value in policy.items() if recorded.get(name) != value]:
            raise UserError(
                f"'{file.parent}' holds trajectories that were collected with another {', '.join(changed)}; use the "
                "same to add to them, or collect under another name=..."
            )
    elif not CollectedGroups(file.parent).group_ids:
        write_json(file, policy)


DEEPENED_TASKS = 16
"""Most tasks at which right steps are searched for."""
MAX_FAILED_ROUNDS = 3
MAX_ROUNDS = 16
"""Most states of a task in which decisions are sampled, one after the other."""


def deepen(run: "Run | LocalRun", collected: Sequence[Trajectory]) -> list[Trajectory]:
    """Sample decisions after right steps, at tasks where no attempt was right, and label them.

    So the PRM learns states far behind those that the policy reaches by itself, in which it is to guide attempts. Each
    text is labelled once. Return the attempts that were made, and the decisions as attempts that end there.
    """
    store = CollectedGroups(run.folder.deepened)
    if run.finished("deepen") is not None:
        return list(store.trajectories())
    labeller = labeller_of(run, ())
    labels = Labels(labeller, run.folder.labels)
    held_out = held_out_tasks((one.task.id for one in collected), share=HELD_OUT_SHARE)
    attempts = defaultdict[str, list[Trajectory]](list)
    for one in collected:
        if one.planner_turns and one.task.id not in held_out:
            attempts[one.task.id].append(one)
    unsolved = [search for own in attempts.values() if (search := Search(attempts=own)).is_open]
    searches = random.Random(run.config.seed).sample(unsolved, min(DEEPENED_TASKS, len(unsolved)))
    groups, num_tokens = {group.id: group for group in store.groups()}, 0

    async def search_one(search: Search) -> None:
        nonlocal num_tokens
        num_failed = 0
        for number in range(MAX_ROUNDS):
            group_id = f"deepen/{number}/{search.attempts[0].task.id}"
            scores = search.corrected(labels.scores)
            attempt, num_steps, candidates = search.next_state(scores)
            if group_id not in groups:
                known = partial(labels_as_scores, scores)
                found, tokens = await run.rollouts.search(attempt, num_steps, group_id, known, candidates)
                num_tokens += tokens
                groups[group_id] = Group(id=group_id, trajectories=tuple(found))
                await store.add(groups[group_id])
            if group_id not in store.group_ids:  # the engine failed, or the agent did not repeat the attempt
                labels.failures.append(f"{attempt.id} after {num_steps} turns: {found[0].failure or 'no attempt'}")
                num_failed += 1
                if num_failed == MAX_FAILED_ROUNDS:
                    break
                continue
            search.attempts += groups[group_id].trajectories
            steps = {step.digest: step for step in _steps_of(groups[group_id].trajectories)}
            await labels.add([step for digest, step in steps.items() if digest not in labels.scores])
            if not search.is_open:
                break
        phase.advance()

    with run.phase("deepen", total=len(searches)) as phase:
        asyncio.run(side_by_side(searches, search_one, limit=DEEPENED_TASKS))
        if searches and not store.group_ids:
            raise UserError(f"the search for right steps could repeat no attempt; the first: {labels.failures[0]}")
        num_right = sum(not one.is_open for one in searches)
        phase.facts.update(num_tasks=len(searches), num_right=num_right, num_tokens=num_tokens)
        phase.facts["first_failures"] = labels.failures[:3]
    if searches:
        run.console.note(
            f"attempts after right steps are right at {num_right} of {len(searches)} tasks{_cost(labeller)}"
        )
    return list(store.trajectories())


MAX_OPEN_STEPS = 24
MAX_FAILURES_IN_A_ROW = 20

Step = tuple[str, str, int]
"""The digest of a step's text, its trajectory and its number."""


def labeller_of(run: "Run | LocalRun", collected: Sequence[Trajectory]) -> Labeller:
    """Return the labeller of the recipe. Only Monte Carlo needs an engine, to continue from a step."""
    config, settings, rubric = run.config, run.config.label, CUSTOM_AGENT_RUBRIC
    if isinstance(settings, MonteCarloLabelConfig):
        return MonteCarloLabeller(collected, run.rollouts.continue_from, continuations=settings.continuations)
    if not isinstance(settings, JudgeLabelConfig):
        return PlanLabeller(collected)
    if isinstance(config.agent, PlannerAgentConfig):
        rubric = planner_rubric(config.envs.actions, own_descriptions(config.envs))
    return StepJudge(settings.judge, receipts=run.folder.receipts, rubric=rubric)


def labeller_name(config: LabelConfig) -> str:
    """Return the labeller name in the labels of the recipe's labeller."""
    return judge_name(config.judge) if isinstance(config, JudgeLabelConfig) else config.type


def labels_of(config: LabelConfig, labels: Iterable[StepLabel]) -> list[StepLabel]:
    """Return the labels of the recipe's labeller."""
    name = labeller_name(config)
    return [label for label in labels if label.labeller == name]


class Labels:
    """The labels of one labeller in a file, to which `add` appends."""

    def __init__(self, labeller: Labeller, path: Path) -> None:
        self._labeller, self._path = labeller, path
        self.by_step = {_place(label): label for label in read_labels(path) if label.labeller == labeller.name}
        self.scores = {label.text_digest: label.score for label in self.by_step.values()}
        """By the digests of texts."""
        self.failures: list[str] = []
        """Why steps got no label. Those are tried again at the next start."""
        self._in_a_row = 0

    async def add(self, steps: Sequence[StepText], on_step: Callable[[], None] = lambda: None) -> None:
        """Label every step without a label, several at a time.

        An error that ends the run (a spent budget, a refused key, MAX_FAILURES_IN_A_ROW) is raised after the labels of
        all started steps are on disk, because they may be paid for.
        """

        async def add_one(step: StepText) -> None:
            try:
                if _place(step) not in self.by_step:
                    label = await self._labeller.label(step)
                    append_label(self._path, label)
                    self.by_step[_place(step)] = label
                    self.scores[label.text_digest] = label.score
                self._in_a_row = 0
            except VotesDisagreeError as error:
                self.failures.append(str(error))
                self._in_a_row = 0
            except LabelError as error:
                self.failures.append(str(error))
                self._in_a_row += 1
                if self._in_a_row >= MAX_FAILURES_IN_A_ROW:  # in each of several calls
                    raise UserError(
                        f"{self._in_a_row} steps in a row got no label from {self._labeller.name}, the last because: "
                        f"{error}; labels so far are kept"
                    ) from error
            on_step()

        await side_by_side(steps, add_one, limit=MAX_OPEN_STEPS)


def _place(step: StepText | StepLabel) -> Step:
    digest = step.digest if isinstance(step, StepText) else step.text_digest
    return digest, step.trajectory_id, step.step


def label(run: "Run | LocalRun", collected: Sequence[Trajectory]) -> None:
    """Label every step; each label is on disk before the next is requested."""
    if run.finished("label") is None:
        labeller, steps = labeller_of(run, collected), _steps_of(collected)
        labels = Labels(labeller, run.folder.labels)
        with run.phase("label", total=len(steps)) as phase:
            asyncio.run(labels.add(steps, phase.advance))
            facts = {"num_labels": len(labels.by_step), "first_failures": labels.failures[:3]}
            phase.facts.update(labeller=run.config.label.type, **facts)
            if isinstance(labeller, StepJudge):
                phase.facts["spent"] = asdict(labeller.client.spent)
        num_labelled = sum(_place(step) in labels.by_step for step in steps)
        failed = f"; the first failure: {labels.failures[0]}" if labels.failures else ""
        run.console.note(f"{labeller.name}: {num_labelled} of {len(steps)} steps labelled{_cost(labeller)}{failed}")


def _cost(labeller: Labeller) -> str:
    """Return what a judge has cost so far, as the rest of a sentence; empty for other labellers."""
    if not isinstance(labeller, StepJudge):
        return ""
    bill = labeller.client.spent
    return (
        f", so far {bill.requests} calls, {bill.input_tokens} tokens in, {bill.output_tokens} tokens out, "
        f"{bill.cost_usd:.4f} US dollars"
    )


def _steps_of(collected: Sequence[Trajectory]) -> list[StepText]:
    return [step for trajectory in collected for step in step_texts(trajectory)]


def learn_prm(run: "Run | LocalRun", collected: Sequence[Trajectory]) -> None:
    """Train the PRM on the tasks that are not held out, save it, and write down its quality on the others."""
    if run.finished("train_prm") is not None:
        return
    labels = labels_of(run.config.label, read_labels(run.folder.labels))
    data = prm_data(collected, labels)
    for warning in check_labels(collected, labels):
        run.console.note(warning)
    total, prm = num_batches(data.train, num_epochs=run.config.prm.num_epochs), run.prm
    with run.phase("train_prm", total=total) as phase:
        for step, loss in enumerate(prm.train(data.train)):
            run.log_metrics(step, {"train_prm/loss": loss})
            phase.advance(loss=loss)
        digest = prm.save(run.folder.prm, {"num_steps": len(data.train)})
        quality = evaluate_prm(data, collected, score=prm.score, seed=run.config.seed)
        write_json(run.folder.quality, quality | {"digest": digest})
        phase.facts.update(digest=digest, num_steps=len(data.train))
    spearman, auroc = quality["spearman_within_group"], quality["auroc_outcome"]
    run.console.note(
        f"PRM on held-out tasks: Spearman within group {shown(spearman)}, AUROC of the outcome {shown(auroc)}"
    )


def run_train_prm(config: RunConfig, adapter: Path | None) -> None:
    """Train a PRM of the base model's or a checkpoint's attempts in the run folder, or continue to.

    Raises UserError if the folder holds attempts of another policy or a training run, or if another process works on
    the run.
    """
    if (config.run_path / "config.json").exists():
        raise UserError(f"'{config.run_path}' is the folder of a training run; train the PRM under another name=...")
    check_labelling(config)
    check_judge_key(config)
    with LocalRun(config, adapter) as run, locked(run.folder.path):
        _keep_policy(run)
        prepare_prm(run)
    use_it = shlex.quote(f"reward.credit.prm_path={run.folder.prm}")
    run.console.note(f"PRM: {run.folder.prm}; use it with {use_it}\nquality: {run.folder.quality}")
