"""From the rows of a benchmark, local or public, to tasks; also for the plain layout {id, question, answer}."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from configs.wording import reason
from envs.types import Task

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSet:
    """Where the rows are published. A gated one needs its terms accepted, and a login of the hub."""

    id: str
    split: str
    config: str | None = None
    gated: bool = False


def local_rows(path: Path) -> list[Row]:
    """One JSON object a line, or the rows of a Parquet file. Raises ValueError for what is neither."""
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    rows = []
    # A mark of byte order, which some editors write, is no part of the first line.
    with path.open(encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_object(line, f"{path}, line {number}"))
        except UnicodeDecodeError:
            raise ValueError(f"{path} is not UTF-8 text") from None
    return rows


def _parquet_rows(path: Path) -> list[Row]:
    import pyarrow
    from pyarrow.parquet import read_table

    try:
        return plain_rows(read_table(path))
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Parquet file: {reason(error)}") from None


def plain_rows(table: "pyarrow.Table") -> list[Row]:
    """Values that JSON can hold: dates and decimals are texts. Empty values are left out, and other values, such as
    pictures, too."""
    return [
        {name: plain for name, value in row.items() if (plain := _plain(value)) is not None}
        for row in table.to_pylist()
    ]


def _plain(value: object) -> object:
    try:
        return json.loads(json.dumps(value, default=_as_text))
    except TypeError:
        return None


def _as_text(value: object) -> str:
    if isinstance(value, date | time | Decimal):
        return str(value)
    raise TypeError


def public_rows(source: PublicSet) -> list[Row]:
    """Downloaded through `datasets`, or taken from its cache. Raises ValueError where that is not possible."""
    from datasets import load_dataset

    try:
        return list(load_dataset(source.id, source.config, split=source.split))
    except Exception as error:
        gated = "; it is gated: accept its terms and log in to the hub first" if source.gated else ""
        raise ValueError(
            f"the public data set {source.id} could not be loaded ({type(error).__name__}){gated}; "
            "or give a folder with its file by --data"
        ) from error


def _object(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{place} is no JSON object")
    return row


SHORT = "Answer in a few words: a name, a number, a date, yes or no."
LETTER = "Answer with the letter alone."
GAIA = (
    "Answer with a number, as few words as possible, or a comma-separated list of these. Write no thousands separator "
    "and no unit unless it is asked for, no article and no abbreviation."
)
_OPTION = re.compile(r"^([A-J])[.)] +(\S.*)$", re.MULTILINE)


def read_short_answer(name: str, index: int, row: Row) -> Task:
    """A question with one or more accepted answers."""
    answers = _strings(row["golden_answers"] if "golden_answers" in row else row["answer"])
    aliases = list(dict.fromkeys(" ".join(text.split()) for text in (*answers, *_strings(row.get("aliases", [])))))
    return _task(name, index, row, f"{_text(row, 'question')}\n{SHORT}", "\n".join(filter(None, aliases)))


def read_gaia(name: str, index: int, row: Row) -> Task | None:
    """None for a question with an attachment: it is not text only."""
    if row.get("file_name"):
        return None
    question = _text(row, "Question" if "Question" in row else "question")
    answer = " ".join(_without_null(row["Final answer"] if "Final answer" in row else row["answer"]).split())
    return _task(name, index, row, f"{question}\n{GAIA}", answer)


def read_number(name: str, index: int, row: Row) -> Task:
    """A whole number loses the `.0` that its column type gives it."""
    answer = re.sub(r"\.0+$", "", _without_null(row["answer"]).strip())
    return _task(name, index, row, _text(row, "question"), answer)


def read_medqa(name: str, index: int, row: Row) -> Task:
    options = row.get("options")
    if isinstance(options, Mapping):
        return _choice(name, index, row, _text(row, "question"), dict(options), str(row["answer_idx"]))
    return _listed_choice(name, index, row)


def read_gpqa(name: str, index: int, row: Row) -> Task:
    """The public rows name the right option first: each question has its own fixed order here."""
    if "Correct Answer" not in row:
        return _listed_choice(name, index, row)
    right = str(row["Correct Answer"]).strip()
    texts = [right, *(str(row[f"Incorrect Answer {number}"]).strip() for number in (1, 2, 3))]
    random.Random(f"gpqa|{row['Question']}").shuffle(texts)
    letters = dict(zip("ABCD", texts, strict=True))
    return _choice(name, index, row, _text(row, "Question"), letters, "ABCD"[texts.index(right)])


def names_its_form(question: str) -> bool:
    """Whether it ends in the form of its answer, as those of benchmarks do."""
    return question.rpartition("\n")[2] in (SHORT, LETTER, GAIA)


def stem_of(question: str) -> str:
    """The question as its authors wrote it, without the options and the form of the answer that stand below it."""
    lines = question.split("\n")
    if names_its_form(question):
        lines.pop()
    while len(lines) > 1 and _OPTION.fullmatch(lines[-1]):
        lines.pop()
    return "\n".join(lines)


def _listed_choice(name: str, index: int, row: Row) -> Task:
    """The question lists its options, `A. text` a line; the answer is a letter or an option's text."""
    question, answer = _text(row, "question"), str(row["answer"]).strip()
    options = dict(_OPTION.findall(question))
    found = [letter for letter, text in options.items() if answer in (letter, text.strip())]
    if len(found) != 1:
        raise ValueError(f"{name} row {index}: the answer {answer!r} is {len(found)} of the options in the question")
    stem = question[: next(_OPTION.finditer(question)).start()].rstrip()
    return _choice(name, index, row, stem, options, found[0])


def _choice(name: str, index: int, row: Row, stem: str, options: Mapping[str, str], letter: str) -> Task:
    if letter not in options:
        raise ValueError(f"{name} row {index}: {letter!r} is none of the options {', '.join(options)}")
    lines = [f"{key}. {' '.join(options[key].split())}" for key in sorted(options)]
    return _task(name, index, row, "\n".join((stem, *lines, LETTER)), lines[sorted(options).index(letter)])


def _task(name: str, index: int, row: Row, question: str, answer: str) -> Task:
    if not answer:
        raise ValueError(f"{name} row {index} has no reference answer")
    given = next((row[key] for key in ("id", "task_id", "Record ID") if row.get(key) not in (None, "")), index)
    return Task(id=f"{given}", dataset=name, question=question, answer=answer)


def _text(row: Row, column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a row needs text in the column {column!r}; it has {', '.join(row)}")
    return text.strip()


def _without_null(value: object) -> str:
    """Empty for null."""
    return "" if value is None else str(value)


def _strings(value: object) -> Sequence[str]:
    return [_without_null(one) for one in value] if isinstance(value, list | tuple) else [_without_null(value)]
