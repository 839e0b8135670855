"""The tasks of a recipe: whether they are there, can be scored, and are apart where they must be."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from configs.errors import did_you_mean
from configs.learner import FileConfig, PlansConfig
from configs.run import RunConfig
from configs.wording import listed, reason
from ray_jobs.run.model_folder import PreflightError

if TYPE_CHECKING:
    from envs.datasets.generated import GeneratedTask
    from envs.datasets.own import OwnSources
    from envs.types import Task


def check_mixes(config: RunConfig) -> None:
    """Whether there are the data sets that the recipe names. Raises PreflightError."""
    from envs.datasets.benchmarks import BENCHMARKS
    from envs.datasets.families import FAMILIES
    from envs.datasets.registry import BUILT_IN

    known = (*config.envs.datasets, *BUILT_IN)
    for name in config.envs.datasets:
        if name in BUILT_IN or name in BENCHMARKS:
            kind = "built-in data set" if name in BUILT_IN else "benchmark"
            raise PreflightError(f"envs.datasets.{name}: '{name}' is a {kind}; give yours another name")
    for key, mix in (("envs.mix", config.envs.mix), ("evaluation.mix", config.evaluation_mix)):
        unknown = [name for name in mix if name not in BUILT_IN and name not in config.envs.datasets]
        if unknown:
            raise PreflightError(
                f"{key} names unknown data set '{unknown[0]}'; known: {', '.join(known)}"
                f"{did_you_mean(unknown[0], known)}"
            )
    if config.envs.choice == "learnable":
        _check_choice([name for name, share in config.envs.mix.items() if share > 0], tuple(FAMILIES))


def _check_all_is_drawn(config: RunConfig) -> None:
    """Whether tasks that somebody brought are drawn. Where a mix is written, data sets may stand beside it. Raises
    PreflightError."""
    from envs.datasets.own import OWN

    drawn, of_a_file = dict.fromkeys([*config.envs.mix, *config.evaluation_mix]), (*OWN, "aime", "game24")
    unread = [name for name in config.envs.datasets if name not in drawn]
    if unread and "mix" not in config.envs.model_fields_set:
        raise PreflightError(
            f"envs.datasets.{unread[0]} is in no mix, so the tasks of {_shown(config.envs.mix)} would be drawn; set "
            f"envs.mix={{{unread[0]}=1.0}}"
        )
    if config.envs.data_path and not drawn.keys() & set(of_a_file):
        raise PreflightError(
            f"envs.data_path = '{config.envs.data_path}' is read by none of {listed(drawn)}; put one of "
            f"{', '.join(of_a_file)} into envs.mix, for example envs.mix={{own_text=1.0}}, or leave the file out"
        )


def _check_choice(names: Sequence[str], families: Sequence[str]) -> None:
    """Whether there is something to choose from. Raises PreflightError."""
    rule = (
        f"envs.choice = 'learnable' chooses between families of generated tasks ({', '.join(families)}), and envs.mix"
    )
    if others := [name for name in names if name not in families]:
        raise PreflightError(f"{rule} names '{others[0]}', which is none; leave it out, or set envs.choice = 'mix'")
    if len(names) < 2:
        raise PreflightError(f"{rule} names one, '{names[0]}'; name another, or set envs.choice = 'mix'")


def check_tasks(config: RunConfig, *, training: bool) -> None:
    """Draw every kind of task once: files are read, public data sets downloaded, counts compared."""
    from envs.datasets.own import OwnSources
    from envs.datasets.sampler import cold_start_tasks, evaluation_tasks, training_tasks

    _check_all_is_drawn(config)
    mix = config.envs.mix
    path = Path(config.envs.data_path) if config.envs.data_path else None
    try:
        own = OwnSources.of(config)
        asked = evaluation_tasks(config)
        _check_examples_are_not_asked(config, asked)
        if training:
            _check_recordings_do_not_ask(config, asked)
            training_tasks(config)
        _check_never_trained_on(config, asked, with_teacher=own.with_teacher)
        _check_references({*mix, *config.evaluation_mix}, path, own)
        if training:
            _check_plans(config, cold_start_tasks(config))
    except (ValueError, OSError, KeyError) as error:
        held_out = "" if config.evaluation.mix is None else f" or evaluation.mix = {_shown(config.evaluation.mix)}"
        raise PreflightError(
            f"the tasks of envs.mix = {_shown(mix)}{held_out} cannot be drawn: {reason(error)}"
        ) from error


def prm_tasks(config: RunConfig, *, leak_report: Path | None = None) -> "list[Task]":
    """The tasks of the trajectories that a PRM learns from, as `collection_tasks` draws them. Raises PreflightError
    where they cannot be drawn, or are too few."""
    from envs.datasets.own import OwnSources
    from envs.datasets.sampler import collection_tasks

    own = OwnSources.of(config)
    try:
        tasks = collection_tasks(config.envs, config.collect, seed=config.seed, leak_report=leak_report, own=own)
    except (ValueError, OSError, KeyError) as error:
        raise PreflightError(
            f"the tasks that a PRM learns from cannot be drawn: {reason(error)}; or credit by outcomes alone: "
            "reward.credit=outcome"
        ) from error
    if len(tasks) < 2:
        raise PreflightError(
            f"a PRM needs two tasks, one to learn from and one to be measured on, and envs.mix has {len(tasks)} "
            "for it; add some, or credit by outcomes alone: reward.credit=outcome"
        )
    return tasks


def _check_plans(config: RunConfig, tasks: "Sequence[GeneratedTask]") -> None:
    """Whether the planner can write all that the cold start plays. Raises PreflightError."""
    from rollout.engines.wrappers import demonstrated_plans

    if not isinstance(config.cold_start, PlansConfig):
        return
    actions, max_steps = config.envs.actions, config.planner.max_steps
    plans = demonstrated_plans(tasks, config.cold_start.wrong_share, seed=config.seed)
    if off := [*dict.fromkeys(step.action for plan in plans for step in plan if step.action not in actions)]:
        raise PreflightError(
            f"the cold start plays plans that call {listed(off, 'and')}, which envs.actions = {json.dumps(actions)} "
            f"leaves out; switch {'them' if len(off) > 1 else 'it'} on, or set cold_start.num_demonstrations=0"
        )
    longest = max(plans, key=len, default=())
    if len(longest) > max_steps:
        raise PreflightError(
            f"the cold start plays plans of up to {len(longest)} steps ({', '.join(step.action for step in longest)}), "
            f"and agent.max_steps = {max_steps}; set agent.max_steps={len(longest)}, or "
            "cold_start.num_demonstrations=0"
        )


def _check_references(names: set[str], path: Path | None, own: "OwnSources") -> None:
    """A reference that its own comparison does not take for right can never be met. A scorer of one's own is asked
    once. Raises ValueError and OwnCodeError."""
    from reward.scorers import score_answer
    from reward.scorers.text import aliases
    from rollout.filters import SOLVED

    asked: set[str] = set()
    datasets: dict[str, str] = {}
    for task in _own_tasks(names, path, own):
        if (other := datasets.setdefault(task.id, task.dataset)) != task.dataset:
            raise ValueError(
                f"'{other}' and '{task.dataset}' both have a task '{task.id}', which is the data set's name and the "
                "row's id; give one of the data sets another name"
            )
        scorer = task.scorer or task.dataset
        if scorer in own.datasets:
            raise ValueError(
                f"nobody scores {task.id}: set envs.datasets.{scorer}.scorer or reward.scorer, or give the task one"
            )
        if ":" in scorer and scorer in asked:
            continue
        asked.add(scorer)
        place = "" if task.dataset in own.datasets else f"{path}: "
        wrong = f"{place}{task.id} has the answer {task.answer!r:.80}, which is none for '{scorer}'"
        reference = task.answer if ":" in scorer else aliases(task.answer)[0]
        try:
            score = score_answer(task, reference)
        except ValueError as error:
            raise ValueError(wrong) from error
        if ":" not in scorer and score != SOLVED:
            raise ValueError(wrong)


def _own_tasks(names: set[str], path: Path | None, own: "OwnSources") -> "Iterator[Task]":
    """The tasks of all data sets of one's own, with their scorers."""
    from envs.datasets.own import OWN, module_tasks, own_tasks

    for name in sorted(names.intersection((*OWN, *own.datasets))):
        found: Iterable[list[Task]]
        if name in own.datasets:
            found = module_tasks(name, own.datasets[name], own.with_teacher).values()
        else:
            found = own_tasks(name, path, as_written=own.scorer is not None).values()
        yield from (own.scored(task) for part in found for task in part)


def _shown(mix: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{name} = {share}" for name, share in mix.items()) + "}"


def _check_examples_are_not_asked(config: RunConfig, asked: "Sequence[Task]") -> None:
    """An example that solves a held-out task would be counted as solving it. Raises PreflightError."""
    from envs.datasets.split import question_key

    shown = {
        question_key(one.removeprefix("Task: ").partition("\n{")[0]): number
        for number, one in enumerate(config.planner.prompt.examples, start=1)
    }
    for task in asked:
        if number := shown.get(question_key(task.question)):
            raise PreflightError(
                f"agent.prompt.examples: example {number} solves {task.id}, a held-out task; take another"
            )


def _check_recordings_do_not_ask(config: RunConfig, asked: "Sequence[Task]") -> None:
    """What is imitated before RL must not show how a held-out task is solved: no message of a user, and no line of one,
    may be its question. Raises PreflightError."""
    if not isinstance(config.cold_start, FileConfig):
        return
    from envs.datasets.split import question_key
    from rollout.agent.demonstrations import read_conversations

    shown = {
        question_key(text): one.place
        for one in read_conversations(config.cold_start.path)
        for said in one.said_by_users()
        for text in (said, *said.split("\n"))
    }
    for task in asked:
        if place := shown.get(question_key(task.question)):
            raise PreflightError(
                f"{place}: the cold start would imitate a conversation about {task.id}, a held-out task; leave it out "
                "of the file, or let the data set train on that question by its 'split'"
            )


def _check_never_trained_on(config: RunConfig, asked: "Sequence[Task]", *, with_teacher: bool) -> None:
    """A data set is apart by itself, and so are generated families; two others may hold the same question. Raises
    PreflightError, and ValueError and OSError where one cannot be read."""
    from envs.datasets.families import FAMILIES
    from envs.datasets.sampler import never_trained_on

    drawn = (name for mix in (config.envs.mix, config.evaluation_mix) for name, share in mix.items() if share > 0)
    if len({*drawn} - FAMILIES.keys()) < 2:
        return
    kept = never_trained_on(asked, config.envs, with_teacher=with_teacher)
    met = next((task for task, other in zip_longest(asked, kept) if task != other), None)
    if met is not None:
        raise PreflightError(
            f"training on envs.mix = {_shown(config.envs.mix)} meets {len(asked) - len(kept)} of {len(asked)} held-out "
            f"tasks, first {met.id} of '{met.dataset}'; leave such questions out of one of the data sets, or hold them "
            "out in all of them by their 'split'"
        )


def notes_before_start(config: RunConfig) -> list[str]:
    """What is no reason to refuse a run that passed its checks, and must be known before its numbers are believed."""
    from envs.datasets.own import OWN, own_tasks
    from envs.datasets.sampler import evaluation_tasks
    from envs.leakage import find_leaks

    notes = []
    names = sorted({*config.envs.mix} & {*config.evaluation_mix} & {*OWN})
    # Those that are asked, and no more: the time grows with the product of both numbers.
    asked = evaluation_tasks(config) if names else []
    for name in names:
        halves = own_tasks(name, Path(config.envs.data_path) if config.envs.data_path else None)
        questions = [(task.id, task.question) for task in halves["train"]]
        if leaks := find_leaks(questions, [task.question for task in asked if task.dataset == name]):
            notes.append(
                f"{len(leaks)} of {len(questions)} training questions of {name} read like a held-out one, first "
                f"{leaks[0]}: the same in other words, or made from one template. What is learnt by heart may count as "
                'solved; keep such questions in one half by a field "split"'
            )
    return notes
