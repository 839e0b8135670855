"""Tasks that a function of one's own returns or the hub has, and the scorer that a recipe gives to all tasks."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from configs.envs import OwnDatasetConfig
from configs.learner import TeacherConfig
from configs.own import OwnCodeError, failure, own_function
from configs.run import RunConfig
from configs.wording import listed
from envs.benchmarks.readers import plain_rows
from envs.datasets.own import QUESTIONS, check_apart, check_distinct, is_answer, one_a_line, question_of
from envs.datasets.split import purpose_of, question_key, split_of
from envs.types import Task

if TYPE_CHECKING:
    from pyarrow import Table

Part = Literal["train", "eval", "demonstrations", "prm"]
PARTS: tuple[Part, ...] = ("train", "eval", "demonstrations", "prm")
"""What a task is for: RL, evaluation, a teacher, or the trajectories that a PRM learns from."""
_NAMES = listed(PARTS)

_FIELDS = ("id", "answer", "split", "scorer")
_OURS = ("split", "scorer")
"""What a row of one's own may say, and a column of anybody's data set may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSources:
    """What a recipe adds: data sets by name, and who scores tasks that name no scorer."""

    datasets: Mapping[str, OwnDatasetConfig] = field(default_factory=dict)
    scorer: str | None = None
    scoring_limit_s: float = 10.0
    with_teacher: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> "OwnSources":
        return cls(
            datasets=config.envs.datasets,
            scorer=config.reward.scorer,
            scoring_limit_s=config.reward.timeout_s,
            with_teacher=isinstance(config.cold_start, TeacherConfig),
        )

    def scored(self, task: Task) -> Task:
        """The task with its scorer, where it has one that is not its data set's."""
        scorer = task.scorer or self.scorer
        return task if scorer is None else replace(task, scorer=scorer, scoring_limit_s=self.scoring_limit_s)

    def tasks(self, name: str, part: Part) -> list[Task]:
        """The tasks of one part of a data set. Raises ValueError and OwnCodeError."""
        found = module_tasks(name, self.datasets[name], self.with_teacher)
        if not found[part]:
            raise ValueError(
                f"{name!r} ({self.datasets[name].source}) has {sum(map(len, found.values()))} tasks and none for "
                f"'{part}'; return more, or say which is which by a 'split' of {_NAMES} in each"
            )
        return [self.scored(task) for task in found[part]]


NO_SOURCES = OwnSources()


@lru_cache(maxsize=16)
def module_tasks(name: str, config: OwnDatasetConfig, with_teacher: bool = False) -> Mapping[Part, list[Task]]:
    """All tasks of the function or of the hub, by what they are for; it is asked once in a process.

    A task's `split` says its part, in all of them or in none. Where none says so the question's hash does: half are for
    evaluation, and of the others a quarter for the PRM and, in a run with a teacher, a quarter for that; the same for a
    question in other case, spacing or punctuation. A held-out split of the hub is for evaluation as it is.
    Raises ValueError, which names function and row, for what is no task, for an id or a question that stands twice, and
    OwnCodeError where the function fails.
    """
    rows = _rows(name, config)
    tasks = [_task(name, config, row, number) for number, row in enumerate(rows, start=1)]
    check_distinct("id", [task.id for task in tasks], config.source)
    check_distinct("question", [" ".join(task.question.casefold().split()) for task in tasks], config.source)
    named = [task.metadata.get("split") for task in tasks]
    found: dict[Part, list[Task]] = {part: [] for part in PARTS}
    part: Part
    for number, (task, split) in enumerate(zip(tasks, named, strict=True), start=1):
        if config.eval_split is not None:
            part = "eval" if split == "eval" else _learning(task.question, with_teacher)
        elif any(named):
            part = _part(split, f"{config.source}, row {number}")
        else:
            part = _hashed(task.question, with_teacher)
        metadata = {key: value for key, value in task.metadata.items() if key != "split"}
        found[part].append(replace(task, metadata=metadata))
    check_apart(found, config.source)
    return found


def _rows(name: str, config: OwnDatasetConfig) -> Sequence[object]:
    if config.is_hub:
        return _hub_rows(name, config)
    key = f"envs.datasets.{name}.source"
    function = own_function(config.source, key=key, takes="")
    try:
        returned = function()
        rows = list(returned) if isinstance(returned, Iterable) else None
    except Exception as error:
        raise OwnCodeError(f"{key}: '{config.source}' failed with {failure(error)}") from error
    if not rows:
        what = "no task" if rows is not None else f"a {type(returned).__name__}"
        raise OwnCodeError(
            f"{key}: '{config.source}' returned {what}; it must return tasks or tables, as a list or one by one"
        )
    return rows


def _task(name: str, config: OwnDatasetConfig, row: object, number: int) -> Task:
    place = f"{config.source}, row {number}"
    if isinstance(row, Task):
        return _ready_made(name, config, row, place)
    if not isinstance(row, Mapping):
        raise ValueError(f"{place}: a task is an envs.types.Task or a table, got a {type(row).__name__}")
    question, field = question_of(row, place)
    scorer = _scorer(row.get("scorer"), config, place)
    further = {key: value for key, value in row.items() if key not in (*_FIELDS, field) or (key == "split" and value)}
    _check_json(further, place)
    own_id = number if row.get("id") is None else row["id"]
    return Task(
        id=f"{name}-{own_id}",
        dataset=name,
        question=question,
        answer=_answer(row.get("answer"), scorer, place),
        scorer=scorer,
        metadata=further,
    )


def _ready_made(name: str, config: OwnDatasetConfig, task: Task, place: str) -> Task:
    """A task that the function made itself: like a table's, but that its answer stays as it is written."""
    question, _ = question_of({"question": task.question}, place)
    if not is_answer(task.answer):
        raise ValueError(f"{place}: 'answer' must be a text or a whole number, got {task.answer!r:.80}")
    _check_json(task.metadata, place)
    scorer = _scorer(task.scorer, config, place)
    # Two data sets may count their tasks alike.
    return replace(
        task, id=f"{name}-{task.id}", dataset=name, question=question, answer=str(task.answer), scorer=scorer
    )


def _scorer(named: object, config: OwnDatasetConfig, place: str) -> str | None:
    scorer = config.scorer if named in (None, "") else named
    if scorer is not None and not isinstance(scorer, str):
        raise ValueError(f"{place}: 'scorer' must be a text such as 'integer' or 'my_reward:score', got {scorer!r:.80}")
    return scorer


def _answer(answer: object, scorer: str | None, place: str) -> str:
    of_texts = scorer in (None, "text")
    answers = answer if isinstance(answer, list) and of_texts else [answer]
    if not answers or not all(map(is_answer, answers)):
        kinds = "a text, a whole number or a list of such" if of_texts else "a text or a whole number"
        raise ValueError(f"{place}: 'answer' must be {kinds}, got {answer!r:.80}")
    # Without a scorer it is for reward.scorer, a function, which reads a text as it is written.
    return one_a_line(answers) if scorer == "text" or isinstance(answer, list) else str(answer)


def _check_json(metadata: Mapping[str, object], place: str) -> None:
    """Raises ValueError for what the record of an attempt cannot hold."""
    for name, value in metadata.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise ValueError(
                f"{place}: '{name}' holds a {type(value).__name__}, which is no JSON; make it a text, a number or a "
                "list of such"
            ) from None


def _part(split: object, place: str) -> Part:
    for part in PARTS:
        if split == part:
            return part
    raise ValueError(f"{place}: 'split' must be {_NAMES} in every row or in none, got {split!r}")


def _hashed(question: str, with_teacher: bool) -> Part:
    if split_of(question_key(question)) == "eval":
        return "eval"
    return _learning(question, with_teacher)


def _learning(question: str, with_teacher: bool) -> Part:
    purpose = purpose_of(question)
    if purpose == "demonstrations" and with_teacher:
        return "demonstrations"
    return "prm" if purpose == "prm" else "train"


def _hub_rows(name: str, config: OwnDatasetConfig) -> list[dict[str, object]]:
    """The rows of the split that is trained on, then those that are held out, marked as `split` = "eval". `id`,
    `question` and `answer` are as the setting says, the other columns as they are. Raises ValueError, which names the
    setting, where there is no network, no such data set, configuration, split or column."""
    splits = [split for split in (config.split, config.eval_split) if split is not None]
    return [
        {**row, **({"split": "eval"} if split == config.eval_split else {})}
        for split in splits
        for row in _rows_of(name, config, split)
    ]


def _rows_of(name: str, config: OwnDatasetConfig, split: str) -> list[dict[str, object]]:
    place = f"envs.datasets.{name}"
    table = _table(place, config, split)
    question = config.question or next((name for name in QUESTIONS if name in table.column_names), QUESTIONS[0])
    for setting, column in (("question", question), ("answer", config.answer)):
        if column not in table.column_names:
            raise ValueError(
                f"{place}.{setting} = '{column}' is no column of '{config.hub_id}', which has "
                f"{', '.join(table.column_names)}; name one"
            )
    found = []
    taken = (*_OURS, *QUESTIONS, question, config.answer)
    for number, row in enumerate(plain_rows(table), start=1):
        further = {name: value for name, value in row.items() if name not in taken}
        asked = {question if question in QUESTIONS else "prompt": row.get(question)}
        found.append({**further, **asked, "answer": row.get(config.answer), "id": f"{split}-{number}"})
    return found


def _table(place: str, config: OwnDatasetConfig, split: str) -> "Table":
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        # As they are stored: pictures and sounds are not decoded.
        return load_dataset(config.hub_id, config.config, split=split).with_format("arrow")[:]
    except Exception as error:
        why = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        said = " ".join(f"{type(why).__name__}: {why}".split())[:300]
        raise ValueError(
            f"{place}: the split '{split}' of '{config.hub_id}' cannot be loaded: {said}; check the names and the "
            "network, and for a gated data set the login of the hub"
        ) from error
