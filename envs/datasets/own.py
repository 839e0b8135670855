"""Tasks of one's own: those of a file, in which the name of the data set says how an answer is compared, and those that
a function returns or the hub has; and the scorer that a recipe gives to all tasks."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from configs.envs import OwnDatasetConfig
from configs.errors import listed, whole_letters
from configs.learner import TeacherConfig
from configs.plugins import OwnCodeError, failure, own_function
from configs.run import RunConfig
from envs.datasets.rows import local_rows, plain_rows
from envs.datasets.split import SPLITS, Split, kept_with, purpose_of, question_key, split_of
from envs.types import Task

if TYPE_CHECKING:
    from pyarrow import Table

OWN = ("own_text", "own_integer", "own_math", "own_choice")
QUESTIONS = ("question", "prompt", "messages")
"""Where a row may have its question; the first that it has is taken."""

Part = Literal["train", "eval", "demonstrations", "prm"]
PARTS: tuple[Part, ...] = ("train", "eval", "demonstrations", "prm")
"""What a task is for: RL, evaluation, a teacher, or the trajectories that a PRM learns from."""

AnyPart = TypeVar("AnyPart", bound=str)


def load_own(dataset: str, path: Path | None, *, split: Split, as_written: bool = False) -> list[Task]:
    """The tasks of one half of the file, in its order. Raises ValueError for an empty half, and as `own_tasks`."""
    halves = own_tasks(dataset, path, as_written=as_written)
    if not halves[split]:
        raise ValueError(
            f"{path}: none of its {sum(map(len, halves.values()))} rows is for '{split}'; add rows, or say which is "
            'which by a field "split", "train" or "eval", in each'
        )
    return halves[split]


def own_tasks(dataset: str, path: Path | None, *, as_written: bool = False) -> dict[Split, list[Task]]:
    """The tasks of a file of rows `{"question": ..., "answer": ...}`, by their half.

    The question is as `_question_of` says, further columns are the task's `metadata`. `answer` is a text or a whole
    number, for "own_text" also a list of texts of which each is right; with `as_written`, for a scorer of one's own, a
    text keeps its lines and spaces. `id` is the row's number where it has none. A row's `split` says its half; in a
    file without any the hash of the question, or of `kept_with`, does, the same in other case, spacing or punctuation.
    Raises ValueError, which names the file, for a row that is no task, for a question or an id that two rows have, and
    for a question that both halves have.
    """
    if path is None:
        raise ValueError(f"{dataset!r} reads a file of your own: set envs.data_path to it")
    rows = local_rows(path)
    tasks = [
        _task(
            dataset,
            row,
            number,
            f"{path}, row {number}",
            taken="split",
            several=dataset == "own_text",
            as_written=as_written,
        )
        for number, row in enumerate(rows, start=1)
    ]
    _check_distinct("question", [" ".join(task.question.split()) for task in tasks], path)
    _check_distinct("id", [task.id for task in tasks], path)
    named = [row.get("split") for row in rows]
    is_hashed = all(name is None for name in named)
    found: dict[Split, list[Task]] = {split: [] for split in SPLITS}
    for number, (task, name) in enumerate(zip(tasks, named, strict=True), start=1):
        hashed = split_of(question_key(kept_with(task)))
        found[hashed if is_hashed else _named(name, SPLITS, f"{path}, row {number}")].append(task)
    _check_apart(found, path)
    return found


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
                f"'{part}'; return more, or say which is which by a 'split' of {listed(PARTS)} in each"
            )
        return [self.scored(task) for task in found[part]]


NO_SOURCES = OwnSources()


@lru_cache(maxsize=16)
def module_tasks(name: str, config: OwnDatasetConfig, with_teacher: bool = False) -> Mapping[Part, list[Task]]:
    """All tasks of the function or of the hub, by what they are for; it is asked once in a process.

    A task's `split` says its part, in all of them or in none. Where none says so the hash of the question, or of
    `kept_with`, does: half are for evaluation, and of the others a quarter for the PRM and, in a run with a teacher, a
    quarter for that; the same in other case, spacing or punctuation. A held-out split of the hub is for evaluation as
    it is.
    Raises ValueError, which names function and row, for what is no task, for an id or a question that stands twice, and
    OwnCodeError where the function fails.
    """
    rows = _hub_rows(name, config) if config.is_hub else _returned_rows(name, config)
    tasks = [_task_of(name, config, row, number) for number, row in enumerate(rows, start=1)]
    _check_distinct("id", [task.id for task in tasks], config.source)
    _check_distinct("question", [" ".join(task.question.casefold().split()) for task in tasks], config.source)
    is_named = config.eval_split is None and any(task.metadata.get("split") for task in tasks)
    found: dict[Part, list[Task]] = {part: [] for part in PARTS}
    part: Part
    for number, task in enumerate(tasks, start=1):
        split = task.metadata.get("split")
        if is_named:
            part = _named(split, PARTS, f"{config.source}, row {number}")
        elif (split if config.eval_split else split_of(question_key(kept_with(task)))) == "eval":
            part = "eval"
        else:
            part = _learning(kept_with(task), with_teacher)
        metadata = {key: value for key, value in task.metadata.items() if key != "split"}
        found[part].append(replace(task, metadata=metadata))
    _check_apart(found, config.source)
    return found


def _learning(question: str, with_teacher: bool) -> Part:
    purpose = purpose_of(question)
    if purpose == "demonstrations" and with_teacher:
        return "demonstrations"
    return "prm" if purpose == "prm" else "train"


def _returned_rows(name: str, config: OwnDatasetConfig) -> Sequence[object]:
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


def _hub_rows(name: str, config: OwnDatasetConfig) -> list[dict[str, object]]:
    """The rows of the split that is trained on, then those that are held out, marked as `split` = "eval". `id`,
    `question` and `answer` are as the setting says, the other columns as they are. Raises ValueError, which names the
    setting, where there is no network, no such data set, configuration, split or column."""
    place = f"envs.datasets.{name}"
    found = []
    for split in filter(None, (config.split, config.eval_split)):
        table = _table(place, config, split)
        question = config.question or next((name for name in QUESTIONS if name in table.column_names), QUESTIONS[0])
        for setting, column in (("question", question), ("answer", config.answer)):
            if column not in table.column_names:
                raise ValueError(
                    f"{place}.{setting} = '{column}' is no column of '{config.hub_id}', which has "
                    f"{', '.join(table.column_names)}; name one"
                )
        # What a row of one's own may say by these, a column of anybody's data set may not.
        taken = ("split", "kept_with", "scorer", *QUESTIONS, question, config.answer)
        held_out = {"split": "eval"} if split == config.eval_split else {}
        for number, row in enumerate(plain_rows(table), start=1):
            further = {name: value for name, value in row.items() if name not in taken}
            asked = {question if question in QUESTIONS else "prompt": row.get(question)}
            answered = {"answer": row.get(config.answer), "id": f"{split}-{number}"}
            found.append({**further, **asked, **answered, **held_out})
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


def _task_of(name: str, config: OwnDatasetConfig, row: object, number: int) -> Task:
    """Of a table, or of a task that the function made itself: that keeps its answer as it is written."""
    place = f"{config.source}, row {number}"
    if not isinstance(row, Task | Mapping):
        raise ValueError(f"{place}: a task is an envs.types.Task or a table, got a {type(row).__name__}")
    named = row.scorer if isinstance(row, Task) else row.get("scorer")
    scorer = config.scorer if named in (None, "") else named
    if scorer is not None and not isinstance(scorer, str):
        raise ValueError(f"{place}: 'scorer' must be a text such as 'integer' or 'my_reward:score', got {scorer!r:.80}")
    if isinstance(row, Task):
        question, _ = _question_of({"question": row.question}, place)
        # Two data sets may count their tasks alike.
        task = replace(
            row,
            id=f"{name}-{row.id}",
            dataset=name,
            question=question,
            answer=_answer_of(row.answer, place, several=False, as_written=True),
        )
    else:
        # Without a scorer it is for reward.scorer, a function, which reads a text as it is written.
        several, as_written = scorer in (None, "text"), scorer != "text"
        task = _task(name, row, number, place, taken="scorer", several=several, as_written=as_written)
    for key, value in task.metadata.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise ValueError(
                f"{place}: '{key}' holds a {type(value).__name__}, which is no JSON; make it a text, a number or a "
                "list of such"
            ) from None
    return replace(task, scorer=scorer)


def _task(
    name: str,
    row: Mapping[str, object],
    number: int,
    place: str,
    *,
    taken: str,
    several: bool,
    as_written: bool,
) -> Task:
    """Of a table, whose columns are its `metadata` but for question, answer, id and the one that is `taken`."""
    question, column = _question_of(row, place)
    own_id = number if row.get("id") is None else row["id"]
    return Task(
        id=f"{name}-{own_id}",
        dataset=name,
        question=question,
        answer=_answer_of(row.get("answer"), place, several=several, as_written=as_written),
        metadata={key: value for key, value in row.items() if key not in ("id", "answer", taken, column)},
    )


def _question_of(row: Mapping[str, object], place: str) -> tuple[str, str]:
    """A row's question, and the column that it is in.

    A `prompt` or `messages` may be a conversation in OpenAI's form, of one message of the user. A system's message and
    earlier turns are refused: the planner has instructions of its own, and says nothing that it has not sampled.
    Raises ValueError.
    """
    column = next((name for name in QUESTIONS if row.get(name) is not None), QUESTIONS[0])
    value = row.get(column)
    if isinstance(value, list) and column != QUESTIONS[0]:
        value = _asked(value, f"{place}: '{column}'")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: '{column}' must be a text, got {value!r:.80}")
    return whole_letters(value), column


def _asked(messages: list[Any], place: str) -> object:
    roles = [one.get("role") if isinstance(one, Mapping) else type(one).__name__ for one in messages]
    if roles != ["user"]:
        raise ValueError(
            f"{place} must hold one message, the user's, got {', '.join(map(str, roles)) or 'none'}; the planner has "
            "instructions of its own and no earlier turns: put what it must know into that message"
        )
    return messages[0].get("content")


def _answer_of(answer: object, place: str, *, several: bool, as_written: bool) -> str:
    """A text or a whole number, one a line where there may be `several`. Raises ValueError."""
    answers = answer if isinstance(answer, list) and several else [answer]
    if not answers or not all(map(_is_answer, answers)):
        or_several = ", or a list of such" if several else ""
        raise ValueError(f"{place}: 'answer' must be a text or a whole number{or_several}, got {answer!r:.80}")
    if as_written and not isinstance(answer, list):
        return str(answer)
    return "\n".join(" ".join(str(one).split()) for one in answers)


def _is_answer(value: object) -> bool:
    return (isinstance(value, str) and bool(value.strip())) or (isinstance(value, int) and not isinstance(value, bool))


def _named(name: object, parts: Sequence[AnyPart], place: str) -> AnyPart:
    for part in parts:
        if name == part:
            return part
    raise ValueError(f"{place}: 'split' must be {listed(parts)} in every row or in none, got {name!r}")


def _check_distinct(name: str, values: list[str], path: Path | str) -> None:
    """Raises ValueError, which names the file or function, for a value that stands twice."""
    [(value, times)] = Counter(values).most_common(1) or [("", 0)]
    if times > 1:
        raise ValueError(f"{path}: the {name} {value[:80]!r} stands in {times} rows; keep one of them")


def _check_apart(parts: Mapping[AnyPart, Sequence[Task]], path: Path | str) -> None:
    """Raises ValueError for a question or a `kept_with` that two parts have, also in other case, spacing or
    punctuation."""
    seen: dict[str, tuple[AnyPart, Task]] = {}
    for part, tasks in parts.items():
        for task in tasks:
            other, same = seen.setdefault(question_key(kept_with(task)), (part, task))
            if other != part:
                given = task.metadata.get("kept_with")
                alike = f"both have kept_with = {given!r:.80}" if given else "they ask the same"
                raise ValueError(
                    f"{path}: {task.id} is for '{part}' and {same.id} for '{other}', and {alike} but for "
                    "case, spacing or punctuation; keep one of them, or give both the same 'split'"
                )
