"""Questions of one's own, from JSON Lines or Parquet: the name of the data set says how an answer is compared."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from configs.errors import whole_letters
from envs.benchmarks.readers import local_rows
from envs.datasets.split import SPLITS, Split, question_key, split_of
from envs.types import Task

Part = TypeVar("Part", bound=str)

OWN = ("own_text", "own_integer", "own_math", "own_choice")
QUESTIONS = ("question", "prompt", "messages")
"""Where a row may have its question; the first that it has is taken."""
_FIELDS = ("id", "answer", "split")


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

    The question is as `question_of` says, further columns are the task's `metadata`. `answer` is a text or a whole
    number, for "own_text" also a list of texts of which each is right; with `as_written`, for a scorer of one's own, a
    text keeps its lines and spaces. `id` is the row's number where it has none. A
    row's `split` says its half; in a file without any the question's hash does, the same for a question in other case,
    spacing or punctuation. Raises ValueError, which names the file, for a row that is no task, for a question or an id
    that two rows have, and for a question that both halves have.
    """
    if path is None:
        raise ValueError(f"{dataset!r} reads a file of your own: set envs.data_path to it")
    rows = local_rows(path)
    tasks = [
        _task(dataset, row, f"{path}, row {number}", number, as_written) for number, row in enumerate(rows, start=1)
    ]
    check_distinct("question", [" ".join(task.question.split()) for task in tasks], path)
    check_distinct("id", [task.id for task in tasks], path)
    found: dict[Split, list[Task]] = {split: [] for split in SPLITS}
    for task, split in zip(tasks, _halves(rows, tasks, path), strict=True):
        found[split].append(task)
    check_apart(found, path)
    return found


def _task(dataset: str, row: Mapping[str, object], place: str, number: int, as_written: bool) -> Task:
    question, field = question_of(row, place)
    answers = row.get("answer")
    texts = answers if isinstance(answers, list) and dataset == "own_text" else [answers]
    if not texts or not all(is_answer(text) for text in texts):
        several = ", or a list of such" if dataset == "own_text" else ""
        raise ValueError(f"{place}: 'answer' must be a text or a whole number{several}, got {answers!r}")
    return Task(
        id=f"{dataset}-{number if row.get('id') is None else row['id']}",
        dataset=dataset,
        question=question,
        answer=str(answers) if as_written and not isinstance(answers, list) else one_a_line(texts),
        metadata={name: value for name, value in row.items() if name not in (*_FIELDS, field)},
    )


def question_of(row: Mapping[str, object], place: str) -> tuple[str, str]:
    """A row's question, and the column that it is in.

    A `prompt` or `messages` may be a conversation in OpenAI's form, of one message of the user. A system's message and
    earlier turns are refused: the planner has instructions of its own, and says nothing that it has not sampled.
    Raises ValueError.
    """
    field = next((name for name in QUESTIONS if row.get(name) is not None), QUESTIONS[0])
    value = row.get(field)
    if isinstance(value, list) and field != QUESTIONS[0]:
        value = _asked(value, f"{place}: '{field}'")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: '{field}' must be a text, got {value!r:.80}")
    return whole_letters(value), field


def _asked(messages: list[Any], place: str) -> object:
    roles = [one.get("role") if isinstance(one, Mapping) else type(one).__name__ for one in messages]
    if roles != ["user"]:
        raise ValueError(
            f"{place} must hold one message, the user's, got {', '.join(map(str, roles)) or 'none'}; the planner has "
            "instructions of its own and no earlier turns: put what it must know into that message"
        )
    return messages[0].get("content")


def is_answer(value: object) -> bool:
    """A text, or a whole number."""
    return (isinstance(value, str) and bool(value.strip())) or (isinstance(value, int) and not isinstance(value, bool))


def one_a_line(aliases: Sequence[object]) -> str:
    """As the comparison of texts reads them."""
    return "\n".join(" ".join(str(alias).split()) for alias in aliases)


def check_distinct(name: str, values: list[str], path: Path | str) -> None:
    """Raises ValueError, which names the file or function, for a value that stands twice."""
    [(value, times)] = Counter(values).most_common(1) or [("", 0)]
    if times > 1:
        raise ValueError(f"{path}: the {name} {value[:80]!r} stands in {times} rows; keep one of them")


def check_apart(parts: Mapping[Part, Sequence[Task]], path: Path | str) -> None:
    """Raises ValueError for a question that two parts have, also in other case, spacing or punctuation."""
    seen: dict[str, tuple[Part, Task]] = {}
    for part, tasks in parts.items():
        for task in tasks:
            other, same = seen.setdefault(question_key(task.question), (part, task))
            if other != part:
                raise ValueError(
                    f"{path}: {task.id} is for '{part}' and {same.id} for '{other}', and they ask the same but for "
                    "case, spacing or punctuation; keep one of them, or give both the same 'split'"
                )


def _halves(rows: list[Mapping[str, object]], tasks: list[Task], path: Path) -> list[Split]:
    named = [row.get("split") for row in rows]
    if all(name is None for name in named):
        return [split_of(question_key(task.question)) for task in tasks]
    return [_half(name, f"{path}, row {number}") for number, name in enumerate(named, start=1)]


def _half(name: object, place: str) -> Split:
    for split in SPLITS:
        if name == split:
            return split
    raise ValueError(f"{place}: 'split' must be 'train' or 'eval' in every row or in none, got {name!r}")
