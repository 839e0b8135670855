"""AIME: competition problems with an answer from 0 to 999; up to 2023 for training, 2024 for evaluation."""

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from envs.datasets.rows import Split, local_rows
from envs.types import Task

PUBLIC_IDS: dict[Split, str] = {"train": "di-zhang-fdu/AIME_1983_2024", "eval": "Maxwell-Jia/AIME_2024"}
EXPECTED_COUNTS: dict[Split, int] = {"train": 918, "eval": 30}
EVAL_YEAR = 2024
# Both 80 and 81 were accepted, so an exact scorer cannot decide.
EXCLUDED_IDS = frozenset({"2022-II-8"})

_ID = re.compile(r"(?P<year>[0-9]{4})-(?:I{1,2}-)?[0-9]{1,2}")
_URL = re.compile(r"/(?P<year>[0-9]{4})_AIME_(?P<part>I{1,2})_Problems/Problem_(?P<number>[0-9]{1,2})$")
_ANSWER = re.compile(r"[0-9]{1,3}")


def load_aime(path: Path | None = None, *, split: Split, whole_file: bool = True) -> list[Task]:
    """Load the problems of one split from a csv or jsonl file, or else from the public data set.

    With `whole_file` the number of problems must be the known one: results on a changed data set are not comparable.
    Raises ValueError for another number, for a repeated id, and for a row that is not an AIME problem.
    """
    tasks = []
    for problem in map(_problem, _rows(path, split)):
        match = _ID.fullmatch(problem.id)
        if match is None:
            raise ValueError(f"an AIME problem id must look like 1983-1 or 2022-II-8, got {problem.id!r}")
        year = int(match["year"])
        if problem.id not in EXCLUDED_IDS and (year == EVAL_YEAR if split == "eval" else year < EVAL_YEAR):
            if not _ANSWER.fullmatch(problem.answer):
                raise ValueError(f"AIME {problem.id}: an answer must have 1 to 3 digits, got {problem.answer!r}")
            tasks.append(replace(problem, answer=str(int(problem.answer))))
    source, expected = path or PUBLIC_IDS[split], EXPECTED_COUNTS[split]
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"AIME {split}: the same problem id occurs twice in {source}")
    if whole_file and len(tasks) != expected:
        raise ValueError(
            f"AIME {split}: expected {expected} problems, found {len(tasks)} in {source}; use the original file, or "
            "whole_file=False for a part of it"
        )
    return tasks


def _rows(path: Path | None, split: Split) -> list[Mapping[str, Any]]:
    if path is None:
        from datasets import load_dataset

        return list(load_dataset(PUBLIC_IDS[split], split="train"))
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.DictReader(file))
    return local_rows(path)


def _problem(row: Mapping[str, Any]) -> Task:
    """Read a problem from the columns of the three known layouts."""
    if "ID" in row:
        id, question, answer = str(row["ID"]), row.get("Question", row.get("Problem")), str(row["Answer"])
    elif "url" in row and (match := _URL.search(row["url"])):
        id = "{year}-{part}-{number}".format(**match.groupdict())
        question, answer = row["problem"], str(row["answer"])
    else:
        raise ValueError(f"an AIME row needs ID/Question/Answer, ID/Problem/Answer or url/problem/answer: {[*row]}")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"AIME {id}: a question must be a text, got {question!r}")
    return Task(id=id, dataset="aime", question=question, answer=answer)
