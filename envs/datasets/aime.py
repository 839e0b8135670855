"""AIME: competition problems with an answer from 0 to 999; up to 2023 for training, 2024 for evaluation."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.datasets.rows import local_rows
from envs.datasets.split import Split
from envs.leakage import LeakCheck, check_leaks
from envs.types import Task

PUBLIC_IDS: dict[Split, str] = {"train": "di-zhang-fdu/AIME_1983_2024", "eval": "Maxwell-Jia/AIME_2024"}
EXPECTED_COUNTS: dict[Split, int] = {"train": 918, "eval": 30}
EVAL_YEAR = 2024
# Of the public training file: all rows, those before the evaluation year, those of it.
EXPECTED_ROWS = (933, 919, 14)
# Both 80 and 81 were accepted: no exact scorer can be right about it.
EXCLUDED_IDS = frozenset({"2022-II-8"})

_ID = re.compile(r"(?P<year>[0-9]{4})-(?:I{1,2}-)?[0-9]{1,2}")
_URL = re.compile(r"/(?P<year>[0-9]{4})_AIME_(?P<part>I{1,2})_Problems/Problem_(?P<number>[0-9]{1,2})$")
_ANSWER = re.compile(r"[0-9]{1,3}")
_REMEDY = "use the original file, or whole_file=False for a part of it"

_Problem = tuple[str, str, str]


def load_aime(path: Path | None = None, *, split: Split, whole_file: bool = True) -> list[Task]:
    """The problems of one split, from a csv or jsonl file or from the public data set of the split.

    With `whole_file` the number of problems must be the known one: a data set that lost or gained
    problems would silently change what a result means. Raises ValueError for another number, an id that
    occurs twice, or a row that is no AIME problem.
    """
    return _load(path, split, whole_file)[1]


def load_aime_without_leaks(
    path: Path | None, *, test_questions: Sequence[str], whole_file: bool = True
) -> tuple[list[Task], list[LeakCheck]]:
    """The training problems that leak none of `test_questions`, and the checks for the leak report.

    The checks are of all rows but EXCLUDED_IDS, in the order of the file. Rows from the evaluation year on
    are leaks whatever their text, by the rule "year"; problems with the verdict "review" stay in training.
    Path, `whole_file` and errors as in `load_aime`.
    """
    problems, tasks = _load(path, "train", whole_file)
    questions = [(id, question) for id, question, _ in problems if id not in EXCLUDED_IDS]
    checks = [
        check if _year(check.id) < EVAL_YEAR else replace(check, verdict="leak", rule="year")
        for check in check_leaks(questions, test_questions)
    ]
    leaks = {check.id for check in checks if check.verdict == "leak"}
    return [task for task in tasks if task.id not in leaks], checks


def _load(path: Path | None, split: Split, whole_file: bool) -> tuple[list[_Problem], list[Task]]:
    """All problems of the source, and the tasks of the split among them."""
    source = path or PUBLIC_IDS[split]
    rows = _rows(path, split)
    problems = [_fields(row) for row in rows]
    tasks = [_task(*problem) for problem in problems if _belongs(problem[0], split)]
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"AIME {split}: the same problem id occurs twice in {source}")
    expected = EXPECTED_COUNTS[split]
    if whole_file and len(tasks) != expected:
        raise ValueError(f"AIME {split}: expected {expected} problems, found {len(tasks)} in {source}; {_REMEDY}")
    if whole_file and split == "train" and "Year" in rows[0]:
        _check_public_rows([_year(id) for id, _, _ in problems], source)
    return problems, tasks


def _check_public_rows(years: list[int], source: Path | str) -> None:
    """A file that still has rows of the evaluation year is the public one, or was changed."""
    found = (len(years), sum(year < EVAL_YEAR for year in years), years.count(EVAL_YEAR))
    if max(years) >= EVAL_YEAR and found != EXPECTED_ROWS:
        raise ValueError(
            f"AIME train: expected {EXPECTED_ROWS} rows in all, before {EVAL_YEAR} and of it, "
            f"found {found} in {source}; {_REMEDY}"
        )


def _rows(path: Path | None, split: Split) -> list[Mapping[str, Any]]:
    if path is None:
        from datasets import load_dataset

        return list(load_dataset(PUBLIC_IDS[split], split="train"))
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".jsonl":
        return local_rows(path)
    raise ValueError(f"AIME files end in .csv or .jsonl, got {path}")


def _fields(row: Mapping[str, Any]) -> _Problem:
    """Id, question and answer, under the column names of the three known layouts."""
    for column in ("Question", "Problem"):
        if column in row:
            return str(row["ID"]), _question(row[column], row["ID"]), str(row["Answer"])
    if "url" in row and (match := _URL.search(row["url"])):
        id = "{year}-{part}-{number}".format(**match.groupdict())
        return id, _question(row["problem"], id), str(row["answer"])
    raise ValueError(f"an AIME row needs ID/Question/Answer, ID/Problem/Answer or url/problem/answer: {[*row]}")


def _question(text: object, id: object) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"AIME {id}: a question is a text, got {text!r}")
    return text


def _year(id: str) -> int:
    match = _ID.fullmatch(id)
    if match is None:
        raise ValueError(f"AIME problem ids look like 1983-1 or 2022-II-8, got {id!r}")
    return int(match["year"])


def _belongs(id: str, split: Split) -> bool:
    year = _year(id)
    if id in EXCLUDED_IDS:
        return False
    return year == EVAL_YEAR if split == "eval" else year < EVAL_YEAR


def _task(id: str, question: str, answer: str) -> Task:
    if not _ANSWER.fullmatch(answer):
        raise ValueError(f"AIME {id}: an answer has 1 to 3 digits, got {answer!r}")
    return Task(id=id, dataset="aime", question=question, answer=str(int(answer)))
