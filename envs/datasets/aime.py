"""AIME: competition problems with an answer from 0 to 999; up to 2023 for training, 2024 for evaluation."""

import csv
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from envs.datasets.split import Split
from envs.types import Task

PUBLIC_IDS: dict[Split, str] = {"train": "di-zhang-fdu/AIME_1983_2024", "eval": "Maxwell-Jia/AIME_2024"}
EXPECTED_COUNTS: dict[Split, int] = {"train": 918, "eval": 30}
EVAL_YEAR = 2024
# Both 80 and 81 were accepted: no exact scorer can be right about it.
EXCLUDED_IDS = frozenset({"2022-II-8"})

_ID = re.compile(r"(?P<year>[0-9]{4})-(?:I{1,2}-)?[0-9]{1,2}")
_URL = re.compile(r"/(?P<year>[0-9]{4})_AIME_(?P<part>I{1,2})_Problems/Problem_(?P<number>[0-9]{1,2})$")
_ANSWER = re.compile(r"[0-9]{1,3}")


def load_aime(path: Path | None = None, *, split: Split, whole_file: bool = True) -> list[Task]:
    """The problems of one split, from a csv or jsonl file or from the public data set of the split.

    With `whole_file` the number of problems must be the known one: a data set that lost or gained
    problems would silently change what a result means.
    """
    problems = map(_fields, _rows(path, split))
    tasks = [_task(*problem) for problem in problems if _belongs(problem[0], split)]
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"AIME {split}: the same problem id occurs twice in {path or PUBLIC_IDS[split]}")
    expected = EXPECTED_COUNTS[split]
    if whole_file and len(tasks) != expected:
        source = path or PUBLIC_IDS[split]
        raise ValueError(
            f"AIME {split}: expected {expected} problems, found {len(tasks)} in {source}; "
            "use the original file, or whole_file=False for a part of it"
        )
    return tasks


def _rows(path: Path | None, split: Split) -> Iterable[Mapping]:
    if path is None:
        from datasets import load_dataset

        return load_dataset(PUBLIC_IDS[split], split="train")
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        if path.suffix == ".jsonl":
            return [json.loads(line) for line in file if line.strip()]
    raise ValueError(f"AIME files end in .csv or .jsonl, got {path}")


def _fields(row: Mapping) -> tuple[str, str, str]:
    """Id, question and answer, under the column names of the three known layouts."""
    if "Question" in row:
        return row["ID"], row["Question"], str(row["Answer"])
    if "Problem" in row:
        return row["ID"], row["Problem"], str(row["Answer"])
    if "url" in row and (match := _URL.search(row["url"])):
        return "{year}-{part}-{number}".format(**match.groupdict()), row["problem"], str(row["answer"])
    raise ValueError(f"an AIME row needs ID/Question/Answer, ID/Problem/Answer or url/problem/answer: {[*row]}")


def _belongs(id: str, split: Split) -> bool:
    match = _ID.fullmatch(id)
    if match is None:
        raise ValueError(f"AIME problem ids look like 1983-1 or 2022-II-8, got {id!r}")
    if id in EXCLUDED_IDS:
        return False
    year = int(match["year"])
    return year == EVAL_YEAR if split == "eval" else year < EVAL_YEAR


def _task(id: str, question: str, answer: str) -> Task:
    if not _ANSWER.fullmatch(answer):
        raise ValueError(f"AIME {id}: an answer has 1 to 3 digits, got {answer!r}")
    return Task(id=id, dataset="aime", question=question, answer=str(int(answer)))
