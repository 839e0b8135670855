"""Custom tasks from a file, a function or the Hugging Face hub, and the scorer that a recipe gives to all tasks."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from configs.envs import OwnDatasetConfig
from configs.errors import listed, whole_letters
from configs.learner import TeacherConfig
from configs.plugins import OwnCodeError, failure, own_function
from configs.run import RunConfig
from envs.datasets.rows import hub_table, kept_with, local_rows, plain_rows, purpose_of, question_key, split_of
from envs.types import Task

QUESTIONS = ("question", "prompt", "messages")
"""Columns that may hold the question of a row, in order of preference."""

Part = Literal["train", "eval", "demonstrations", "prm"]
PARTS: tuple[Part, ...] = ("train", "eval", "demonstrations", "prm")
"""Uses of a task: RL, evaluation, a teacher's demonstrations, and trajectories for a PRM."""

_KEPT: tuple[Part, ...] = ("eval", "prm", "demonstrations", "train")
"""The part that keeps a question of several: what is measured first, what is trained on last."""
_TAKEN = ("id", "answer", "split", "scorer")
"""Columns with a meaning, besides the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomSources:
    """Custom data sets and the scorer of a recipe."""

    datasets: Mapping[str, OwnDatasetConfig] = field(default_factory=dict)
    scorer: str | None = None
    """Scorer of tasks that name none."""
    scoring_limit_s: float = 10.0
    with_teacher: bool = False
    """Whether a teacher plays demonstrations, which get a part of the tasks."""
    with_prm: bool = True
    """Whether the run uses a PRM; otherwise RL also asks the tasks on which one would be trained."""

    @classmethod
    def of(cls, config: RunConfig) -> "CustomSources":
        return cls(
            datasets=config.envs.datasets,
            scorer=config.reward.scorer,
            scoring_limit_s=config.reward.timeout_s,
            with_teacher=isinstance(config.cold_start, TeacherConfig),
            with_prm=config.reward.prm is not None,
        )

    def scored(self, task: Task) -> Task:
        """Return the task with its own scorer, or else the recipe's, where there is one."""
        scorer = task.scorer or self.scorer
        return task if scorer is None else replace(task, scorer=scorer, scoring_limit_s=self.scoring_limit_s)

    def tasks(self, name: str, part: Part) -> list[Task]:
        """Return the tasks of one part of a data set. Raises ValueError and OwnCodeError."""
        parts = self.parts(name)
        found = parts["train"] + parts["prm"] if part == "train" and not self.with_prm else parts[part]
        if not found:
            num = sum(map(len, parts.values()))
            raise ValueError(
                f"envs.datasets.{name} ({self.datasets[name].source}) has {num} tasks and none for '{part}'; add some, "
                f"or set 'split' to one of {listed(parts)} in every task"
            )
        return [self.scored(task) for task in found]

    def parts(self, name: str) -> dict[Part, list[Task]]:
        """Return all tasks of a data set by part, without `scored`; its source is read once per process.

        A task's `split` names its part, in all tasks or in none. Without it the hash of the question, or of
        `kept_with`, decides: half of the tasks are for evaluation; of the others a quarter is for the PRM and, with a
        teacher, a quarter for demonstrations. A held-out split of the hub is used for evaluation as it is.

        Raises ValueError, which names source and row, for a row that is not a task, and OwnCodeError if a function
        fails.
        """
        config = self.datasets[name]
        tasks, named = read_source(name, config)

        def part_for_training(task: Task) -> Part:
            purpose = purpose_of(kept_with(task))
            if purpose == "prm" or (purpose == "demonstrations" and self.with_teacher):
                return purpose
            return "train"

        def hashed(task: Task) -> Part:
            return "eval" if split_of(question_key(kept_with(task))) == "eval" else part_for_training(task)

        if config.eval_split:
            named = [part or part_for_training(task) for part, task in zip(named, tasks, strict=True)]
        return _divided(tasks, named, hashed, config.source)

    def num_dropped(self, name: str) -> int:
        """Return the number of duplicates that `parts` leaves out."""
        return len(read_source(name, self.datasets[name])[0]) - sum(map(len, self.parts(name).values()))


NO_SOURCES = CustomSources()


@lru_cache(maxsize=16)
def read_source(name: str, config: OwnDatasetConfig) -> tuple[list[Task], list[object]]:
    """Return the tasks of a source, and the `split` of each; raises as `CustomSources.parts`."""
    rows: Sequence[object]
    if config.is_hub:
        rows = _hub_rows(name, config)
    elif config.is_file:
        rows = local_rows(Path(config.source))
    else:
        key = f"envs.datasets.{name}.source"
        function = own_function(config.source, key=key, takes="")
        try:
            rows = list(function())
        except Exception as error:
            raise OwnCodeError(f"{key}: '{config.source}' failed with {failure(error)}") from None
    tasks = [_source_task(name, config, row, number) for number, row in enumerate(rows, start=1)]
    columns = (row.metadata if isinstance(row, Task) else row for row in rows)
    return tasks, [row.get("split") if isinstance(row, Mapping) else None for row in columns]


def _divided(
    tasks: Sequence[Task],
    named: Sequence[object],
    hashed: Callable[[Task], Part],
    source: str,
) -> dict[Part, list[Task]]:
    """Return the tasks by the part that `named` gives to each, or else `hashed`, without duplicates.

    Of equal questions in one part the first stays. Of one question in several parts, whatever its case, spacing or
    punctuation, or of one `kept_with`, the tasks of the part that is first in `_KEPT` stay. Raises ValueError if this
    leaves nothing of a part.
    """
    is_named = any(name not in (None, "") for name in named)
    placed: list[tuple[Task, Part, str]] = []
    for number, (task, name) in enumerate(zip(tasks, named, strict=True), start=1):
        part = next((part for part in PARTS if part == name), None) if is_named else hashed(task)
        if part is None:
            raise ValueError(
                f"{source}, row {number}: 'split' must be {listed(PARTS)} in every row or in none, got {name!r}"
            )
        placed.append((task, part, question_key(kept_with(task))))
    home = {key: part for kept in reversed(_KEPT) for _, part, key in placed if part == kept}
    unique: dict[tuple[str, Part], Task] = {}
    for task, part, key in placed:
        if home[key] == part:
            unique.setdefault((" ".join(task.question.split()), part), task)
    if emptied := sorted({part for _, part, _ in placed} - {part for _, part in unique}):
        raise ValueError(f"{source}: every question of {listed(emptied)} is also in another part; add other questions")
    if repeated := [id for id, times in Counter(task.id for task in unique.values()).items() if times > 1]:
        raise ValueError(f"{source}: the id {repeated[0][:80]!r} is in several rows with different questions; keep one")
    return {kept: [task for (_, part), task in unique.items() if part == kept] for kept in PARTS}


def _hub_rows(name: str, config: OwnDatasetConfig) -> list[dict[str, object]]:
    """Return the rows of the training split, then those of the evaluation split, marked with `split` = "eval".

    Raises ValueError, which names the setting, for a missing data set, configuration, split or column.
    """
    place = f"envs.datasets.{name}"
    rows = []
    for split in filter(None, (config.split, config.eval_split)):
        try:
            table = hub_table(config.hub_id, config.config, split)
            plain = plain_rows(table)
        except ValueError as error:
            raise ValueError(f"{place}, split '{split}': {error}") from None
        question = config.question or next((name for name in QUESTIONS if name in table.column_names), QUESTIONS[0])
        for setting, column in (("question", question), ("answer", config.answer)):
            if column not in table.column_names:
                raise ValueError(
                    f"{place}.{setting} = '{column}' is not a column of '{config.hub_id}'; set it to one of "
                    f"{', '.join(table.column_names)}"
                )
        # These names control a custom row; a column of a foreign data set must not.
        taken = ("split", "kept_with", "scorer", *QUESTIONS, question, config.answer)
        held_out = {"split": "eval"} if split == config.eval_split else {}
        for number, row in enumerate(plain, start=1):
            rows.append(
                {
                    **{name: value for name, value in row.items() if name not in taken},
                    question if question in QUESTIONS else "prompt": row.get(question),
                    "answer": row.get(config.answer),
                    "id": f"{split}-{number}",
                    **held_out,
                }
            )
    return rows


def _source_task(name: str, config: OwnDatasetConfig, row: object, number: int) -> Task:
    place = f"{config.source}, row {number}"
    if not isinstance(row, Task | Mapping):
        raise ValueError(f"{place}: a task must be an envs.types.Task or a table, got a {type(row).__name__}")
    named = row.scorer if isinstance(row, Task) else row.get("scorer")
    scorer = config.scorer if named in (None, "") else named
    if scorer is not None and not isinstance(scorer, str):
        raise ValueError(f"{place}: 'scorer' must be a text such as 'integer' or 'my_reward:score', got {scorer!r:.80}")
    if isinstance(row, Task):
        columns = {"id": row.id, "question": row.question, "answer": row.answer}
        metadata = {key: value for key, value in row.metadata.items() if key != "split"}
        task = _row_task(name, columns, place, number, several=False, as_written=True)
        task = replace(task, metadata=metadata, scoring_limit_s=row.scoring_limit_s)
    else:
        # A function, as reward.scorer is, reads the text as it is written.
        written = scorer is None or ":" in scorer
        task = _row_task(name, row, place, number, several=scorer in (None, "text"), as_written=written)
    task = replace(task, scorer=scorer)
    try:
        json.dumps(task.metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{place}: the further columns must be texts, numbers or lists of these: {error}") from None
    return task


def _row_task(
    name: str, row: Mapping[str, object], place: str, number: int, *, several: bool, as_written: bool
) -> Task:
    """Return the task of a table; its `metadata` are a list of answers, and all columns without a meaning.

    Without an `id` it is the number of the row. `several` permits a list of accepted answers; `as_written` keeps the
    lines and spaces of an answer.
    """
    question, column = _question_of(row, place)
    answer = row.get("answer")
    answers = answer if isinstance(answer, list) and several else [answer]
    if not answers or any(
        isinstance(one, bool) or not isinstance(one, str | int) or not str(one).strip() for one in answers
    ):
        or_several = ", or a list of these" if several else ""
        raise ValueError(f"{place}: 'answer' must be a text or an integer{or_several}, got {answer!r:.80}")
    kept = as_written and not isinstance(answer, list)
    return Task(
        # Two data sets may use the same ids.
        id=f"{name}-{number if row.get('id') is None else row['id']}",
        dataset=name,
        question=question,
        answer=str(answer) if kept else "\n".join(" ".join(str(accepted).split()) for accepted in answers),
        metadata={key: value for key, value in row.items() if key not in (*_TAKEN, column)}
        | ({"answer": answer} if isinstance(answer, list) else {}),
    )


def _question_of(row: Mapping[str, object], place: str) -> tuple[str, str]:
    """Return a row's question and its column. Raises ValueError.

    A `prompt` or `messages` may be a conversation in OpenAI's form with one message of the user. A system message and
    earlier turns are rejected: the planner has its instructions, and its turns must be sampled.
    """
    column = next((name for name in QUESTIONS if row.get(name) is not None), QUESTIONS[0])
    value = row.get(column)
    if isinstance(value, list) and column != QUESTIONS[0]:
        roles = [entry.get("role") if isinstance(entry, Mapping) else type(entry).__name__ for entry in value]
        if roles != ["user"]:
            raise ValueError(
                f"{place}: '{column}' must hold exactly one message, with the role 'user', got "
                f"{', '.join(map(str, roles)) or 'none'}; put the other content into that message"
            )
        value = value[0].get("content")
        if isinstance(value, list):
            # OpenAI's parts of a message, of which a planner reads texts only.
            texts = [part.get("text") for part in value if isinstance(part, Mapping) and part.get("type") == "text"]
            value = "\n".join(map(str, texts)) if len(texts) == len(value) and all(texts) else value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: '{column}' must be a text, got {value!r:.80}")
    return whole_letters(value), column
