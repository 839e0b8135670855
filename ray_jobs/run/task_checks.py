"""Checks of a recipe's tasks: they exist, can be scored, and training tasks are apart from held-out ones."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.errors import UserError, did_you_mean, listed, reason
from configs.learner import FileConfig, PlansConfig
from configs.run import RunConfig

if TYPE_CHECKING:
    from envs.datasets.custom import CustomSources
    from envs.datasets.generated import GeneratedTask
    from envs.types import Task


def check_mixes(config: RunConfig) -> None:
    """Check that the data sets of the mixes exist."""
    from envs.datasets.benchmarks import BENCHMARKS
    from envs.datasets.sampler import BUILT_IN

    known = (*config.envs.datasets, *BUILT_IN)
    for name in config.envs.datasets:
        if name in BUILT_IN or name in BENCHMARKS:
            raise UserError(f"envs.datasets.{name}: '{name}' is a built-in data set or benchmark; rename yours")
    for key, mix in (("envs.mix", config.envs.mix), ("evaluation.mix", config.evaluation_mix)):
        for name in mix:
            if name not in known:
                near = did_you_mean(name, known)
                if name in BENCHMARKS:
                    near = f"; '{name}' is a benchmark of `agentflow evaluate`: to train on its questions, name a data "
                    near += "set of the hub in envs.datasets, or make a project of a file with `agentflow init --data`"
                raise UserError(f"{key} names unknown data set '{name}'; known: {', '.join(known)}{near}")


def check_tasks(config: RunConfig, *, training: bool) -> None:
    """Draw every kind of task once: read files, download public data sets, compare counts."""
    from envs.datasets.custom import CustomSources
    from envs.datasets.sampler import cold_start_tasks, evaluation_tasks, training_tasks

    _check_all_is_drawn(config)
    mix = config.envs.mix
    try:
        own = CustomSources.of(config)
        held_out = evaluation_tasks(config)
        _check_shown_are_not_held_out(config, held_out, training=training)
        if training:
            training_tasks(config)
        _check_never_trained_on(config, held_out)
        _check_references({*mix, *config.evaluation_mix}, own)
        if training:
            _check_plans(config, cold_start_tasks(config))
    except (ValueError, OSError, KeyError) as error:
        mixes = f"envs.mix = {mix} or evaluation.mix = {config.evaluation_mix}"
        raise UserError(f"the tasks of {mixes} cannot be drawn: {reason(error)}") from error


def prm_tasks(config: RunConfig) -> "list[Task]":
    """Return the tasks of the trajectories that a PRM is trained on. Raises UserError if they are fewer than two."""
    from envs.datasets.custom import CustomSources
    from envs.datasets.sampler import collection_tasks

    own = CustomSources.of(config)
    try:
        tasks = collection_tasks(config.envs.mix, count=config.collect.num_tasks, seed=config.seed, custom=own)
        if len(tasks) < 2:
            raise ValueError(f"envs.mix has {len(tasks)}, and one is for training and one for its quality; add some")
    except (ValueError, OSError, KeyError) as error:
        raise UserError(
            f"the tasks for a PRM cannot be drawn: {reason(error)}; or use outcomes alone: reward.credit=outcome"
        ) from error
    return tasks


def _check_all_is_drawn(config: RunConfig) -> None:
    """Check that a custom data set is not forgotten; if the recipe sets the mix, data sets may be unused."""
    drawn = dict.fromkeys([*config.envs.mix, *config.evaluation_mix])
    unread = [name for name in config.envs.datasets if name not in drawn]
    if unread and "mix" not in config.envs.model_fields_set:
        raise UserError(f"envs.datasets.{unread[0]} is in no mix; set envs.mix={{{unread[0]}=1.0}}")


def _check_plans(config: RunConfig, tasks: "Sequence[GeneratedTask]") -> None:
    """Check that the planner can write every plan that the cold start demonstrates."""
    from rollout.engines.wrappers import demonstrated_plans

    if not isinstance(config.cold_start, PlansConfig):
        return
    actions, max_steps = config.envs.actions, config.planner.max_steps
    plans = demonstrated_plans(tasks, config.cold_start.lazy_share)
    missing = dict.fromkeys(step.action for plan in plans for step in plan if step.action not in actions)
    longest = max(map(len, plans), default=0)
    wrong = None
    if missing:
        wrong = f"call {listed(missing, 'and')}: add them to envs.actions = {json.dumps(actions)}"
    elif longest > max_steps:
        wrong = f"have up to {longest} steps: set agent.max_steps={longest} instead of {max_steps}"
    if wrong:
        raise UserError(f"the cold start's plans {wrong}, or set cold_start.num_demonstrations=0")


def _check_references(names: set[str], own: "CustomSources") -> None:
    """Check that each task has a scorer and a unique id, and that its reference answer scores as solved.

    A custom scorer is called once. Raises ValueError and OwnCodeError.
    """
    from reward.scorers import score_answer
    from reward.scorers.text import aliases
    from rollout.filters import SOLVED

    scored: set[str] = set()
    datasets: dict[str, str] = {}
    for name in sorted(names.intersection(own.datasets)):
        for task in (own.scored(task) for half in own.parts(name).values() for task in half):
            if (other := datasets.setdefault(task.id, task.dataset)) != task.dataset:
                raise ValueError(f"'{other}' and '{task.dataset}' both have a task '{task.id}'; rename a data set")
            scorer = task.scorer or task.dataset
            if scorer in own.datasets:
                raise ValueError(
                    f"{task.id} has no scorer: set envs.datasets.{scorer}.scorer or reward.scorer, or give it one"
                )
            custom = ":" in scorer
            if custom and scorer in scored:
                continue
            scored.add(scorer)
            try:
                score = score_answer(task, task.answer if custom else aliases(task.answer)[0])
            except ValueError:
                score = None
            if score is None or not (custom or score == SOLVED):
                raise ValueError(f"{task.id} has the answer {task.answer!r:.80}, which '{scorer}' does not accept")


def _check_shown_are_not_held_out(config: RunConfig, held_out: "Sequence[Task]", *, training: bool) -> None:
    """Check that no example of the prompt solves a held-out task, and no line of a conversation is about one."""
    from envs.datasets.rows import question_key
    from rollout.agent.demonstrations import read_conversations

    shown = {
        question_key(example.removeprefix("Task: ").partition("\n{")[0]): f"agent.prompt.examples: example {number}"
        for number, example in enumerate(config.planner.prompt.examples, start=1)
    }
    if training and isinstance(config.cold_start, FileConfig):
        shown |= {
            question_key(text): f"{conversation.place}: a conversation of the cold start"
            for conversation in read_conversations(config.cold_start.path)
            for message in conversation.said_by_users()
            for text in (message, *message.split("\n"))
        }
    for task in held_out:
        if place := shown.get(question_key(task.question)):
            raise UserError(
                f"{place} is about {task.id}, a held-out task; take it out, or let the data set train on that question "
                "by its 'split'"
            )


def _check_never_trained_on(config: RunConfig, held_out: "Sequence[Task]") -> None:
    """Check that no data set trains on a question that another holds out. Generated families are apart by nature."""
    from envs.datasets.families import FAMILIES
    from envs.datasets.sampler import never_trained_on

    drawn = (name for mix in (config.envs.mix, config.evaluation_mix) for name, share in mix.items() if share > 0)
    if len({*drawn} - FAMILIES.keys()) < 2:
        return
    kept = {*never_trained_on(held_out, config.envs)}
    if shared := [task for task in held_out if task not in kept]:
        first = shared[0]
        raise UserError(
            f"envs.mix = {config.envs.mix} trains on {len(shared)} of {len(held_out)} held-out "
            f"tasks, first {first.id} of '{first.dataset}'; remove these questions from one of the data sets, or hold "
            "them out in all of them by their 'split'"
        )


def notes_before_start(config: RunConfig) -> list[str]:
    """Return warnings about a recipe that passed its checks: duplicates, and training questions like held-out ones."""
    from envs.datasets.custom import CustomSources
    from envs.datasets.sampler import evaluation_tasks
    from envs.leakage import find_leaks

    own = CustomSources.of(config)
    notes = [
        f"{dropped} rows of {name} are left out: their question or `kept_with` is in another row, and of a question on "
        "both sides the held-out row stays"
        for name in sorted({*config.envs.mix, *config.evaluation_mix} & own.datasets.keys())
        if (dropped := own.num_dropped(name))
    ]
    files = {name for name, source in own.datasets.items() if source.is_file}
    names = sorted({*config.envs.mix} & {*config.evaluation_mix} & files)
    # Only the tasks that are drawn: the time grows with the product of both numbers.
    held_out = evaluation_tasks(config) if names else []
    for name in names:
        questions = [(task.id, task.question) for task in own.parts(name)["train"]]
        if leaks := find_leaks(questions, [task.question for task in held_out if task.dataset == name]):
            notes.append(
                f"{len(leaks)} of {len(questions)} training questions of {name} resemble a held-out one, first "
                f"{leaks[0]}; what is memorised may count as solved: keep such questions in one half by a field "
                '"split"'
            )
    return notes
