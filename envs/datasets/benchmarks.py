"""Ten benchmarks: their sources, their sizes, and the readers of their rows.

A row has the layout of the public data set, or the plain layout {id, question, answer}.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.errors import did_you_mean
from envs.datasets.aime import PUBLIC_IDS, load_aime
from envs.datasets.game24 import PUBLIC_ID, load_game24
from envs.datasets.rows import Row, local_rows
from envs.types import Task

SHORT = "Answer in a few words: a name, a number, a date, yes or no."
LETTER = "Answer with the letter alone."
GAIA = (
    "Answer with a number, as few words as possible, or a comma-separated list of these. Write no thousands separator "
    "and no unit unless it is asked for, no article and no abbreviation."
)
_OPTION = re.compile(r"^([A-J])[.)] +(\S.*)$", re.MULTILINE)


def read_short_answer(name: str, index: int, row: Row) -> Task:
    """Read a question with one or more accepted answers."""
    answers = _strings(row["golden_answers"] if "golden_answers" in row else row["answer"])
    aliases = list(dict.fromkeys(" ".join(text.split()) for text in (*answers, *_strings(row.get("aliases", [])))))
    return _task(name, index, row, f"{_text(row, 'question')}\n{SHORT}", "\n".join(filter(None, aliases)))


def read_gaia(name: str, index: int, row: Row) -> Task | None:
    """Read a question of GAIA; None for a question with an attachment, which is not text only."""
    if row.get("file_name"):
        return None
    question = _text(row, "Question" if "Question" in row else "question")
    answer = " ".join(_without_null(row["Final answer"] if "Final answer" in row else row["answer"]).split())
    return _task(name, index, row, f"{question}\n{GAIA}", answer)


def read_number(name: str, index: int, row: Row) -> Task:
    """Read a numeric answer without the `.0` that the column type adds to integers."""
    answer = re.sub(r"\.0+$", "", _without_null(row["answer"]).strip())
    return _task(name, index, row, _text(row, "question"), answer)


def read_medqa(name: str, index: int, row: Row) -> Task:
    """Read a multiple-choice question with a table of options, or with options in the question."""
    options = row.get("options")
    if isinstance(options, Mapping):
        return _choice(name, index, row, _text(row, "question"), dict(options), str(row["answer_idx"]))
    return _listed_choice(name, index, row)


def read_gpqa(name: str, index: int, row: Row) -> Task:
    """Read a question of GPQA.

    The public rows have the right option first; here each question has a fixed random order.
    """
    if "Correct Answer" not in row:
        return _listed_choice(name, index, row)
    right = str(row["Correct Answer"]).strip()
    texts = [right, *(str(row[f"Incorrect Answer {number}"]).strip() for number in (1, 2, 3))]
    random.Random(f"gpqa|{row['Question']}").shuffle(texts)
    letters = dict(zip("ABCD", texts, strict=True))
    return _choice(name, index, row, _text(row, "Question"), letters, "ABCD"[texts.index(right)])


def names_its_form(question: str) -> bool:
    """Return whether a question ends with the required form of its answer, as those of benchmarks do."""
    return question.rpartition("\n")[2] in (SHORT, LETTER, GAIA)


def stem_of(question: str) -> str:
    """Return the question without the options and the required form of the answer below it."""
    lines = question.split("\n")
    if names_its_form(question):
        lines.pop()
    while len(lines) > 1 and _OPTION.fullmatch(lines[-1]):
        lines.pop()
    return "\n".join(lines)


def _listed_choice(name: str, index: int, row: Row) -> Task:
    """Read a question that lists its options, one `A. text` per line; the answer is a letter or an option."""
    question, answer = _text(row, "question"), str(row["answer"]).strip()
    options = dict(_OPTION.findall(question))
    letters = [letter for letter, text in options.items() if answer in (letter, text.strip())]
    if len(letters) != 1:
        raise ValueError(f"{name} row {index}: the answer {answer!r} is {len(letters)} of the options in the question")
    stem = question[: next(_OPTION.finditer(question)).start()].rstrip()
    return _choice(name, index, row, stem, options, letters[0])


def _choice(name: str, index: int, row: Row, stem: str, options: Mapping[str, str], letter: str) -> Task:
    if letter not in options:
        raise ValueError(f"{name} row {index}: {letter!r} is not one of the options {', '.join(options)}")
    lines = [f"{key}. {' '.join(options[key].split())}" for key in sorted(options)]
    return _task(name, index, row, "\n".join((stem, *lines, LETTER)), lines[sorted(options).index(letter)])


def _task(name: str, index: int, row: Row, question: str, answer: str) -> Task:
    if not answer:
        raise ValueError(f"{name} row {index} has no reference answer")
    id = next((row[key] for key in ("id", "task_id", "Record ID") if row.get(key) not in (None, "")), index)
    return Task(id=f"{id}", dataset=name, question=question, answer=answer)


def _text(row: Row, column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a row needs a text in the column {column!r}; its columns are {', '.join(row)}")
    return text.strip()


def _without_null(value: object) -> str:
    return "" if value is None else str(value)


def _strings(value: object) -> Sequence[str]:
    return [_without_null(text) for text in value] if isinstance(value, list | tuple) else [_without_null(value)]


@dataclass(frozen=True, slots=True)
class PublicSet:
    """A data set of the Hugging Face hub."""

    id: str
    split: str
    config: str | None = None
    gated: bool = False
    """Whether a login is needed, and its terms must be accepted."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark."""

    title: str
    file: str
    """Name of its file in a folder of local data."""
    source: PublicSet
    count: int
    """Number of items."""
    subset: int | None = None
    """Number of items that AgentFlow evaluates on, if fewer."""
    asks_facts: bool = False
    """Whether most items need a search outside."""
    read: Callable[[str, int, Row], Task | None] | None = None
    """Function that makes a task from the benchmark's name, the number of the row and the row. AIME and Game of 24 have
    their loaders instead."""


def _flash_rag(title: str, file: str, config: str, split: str, count: int, subset: int | None = None) -> Benchmark:
    source = PublicSet("RUC-NLPIR/FlashRAG_datasets", split, config)
    return Benchmark(title, file, source, count, subset, asks_facts=True, read=read_short_answer)


BENCHMARKS = {
    "bamboogle": _flash_rag("Bamboogle", "bamboogle.jsonl", "bamboogle", "test", 125),
    "2wiki": _flash_rag("2WikiMultihopQA", "2wiki.jsonl", "2wikimultihopqa", "dev", 12_576, 200),
    "hotpotqa": _flash_rag("HotpotQA", "hotpotqa.jsonl", "hotpotqa", "dev", 7_405, 100),
    "musique": _flash_rag("MuSiQue", "musique.jsonl", "musique", "dev", 2_417, 200),
    "gaia": Benchmark(
        "GAIA, text only",
        "gaia.jsonl",
        PublicSet("gaia-benchmark/GAIA", "validation", "2023_all", gated=True),
        count=127,
        asks_facts=True,
        read=read_gaia,
    ),
    "aime24": Benchmark("AIME 2024", "aime24.jsonl", PublicSet(PUBLIC_IDS["eval"], "train"), count=30),
    "amc23": Benchmark("AMC 2023", "amc23.jsonl", PublicSet("math-ai/amc23", "test"), count=40, read=read_number),
    "game24": Benchmark("Game of 24", "gameof24.jsonl", PublicSet(PUBLIC_ID, "train"), count=1_362, subset=300),
    "gpqa": Benchmark(
        "GPQA Diamond",
        "gpqa.jsonl",
        PublicSet("Idavidrein/gpqa", "train", "gpqa_diamond", gated=True),
        count=198,
        read=read_gpqa,
    ),
    "medqa": Benchmark(
        "MedQA",
        "medqa.jsonl",
        PublicSet("GBaker/MedQA-USMLE-4-options", "test"),
        count=1_273,
        subset=200,
        read=read_medqa,
    ),
}


def load_benchmark(name: str, folder: Path | None, *, whole: bool = True) -> list[Task]:
    """Load all items of a benchmark from its file in `folder`, or from the public data set.

    With `whole` the number of items must be the known one: results on a changed benchmark are not comparable. Raises
    ValueError for another number, a repeated id and an unreadable row, and FileNotFoundError if the folder lacks the
    file.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}{did_you_mean(name, BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    path = None if folder is None else folder / benchmark.file
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"{benchmark.title} needs the file '{path}'; omit --data to download it")
    if name == "aime24":
        tasks = [replace(task, dataset=name) for task in load_aime(path, split="eval", whole_file=False)]
    elif benchmark.read is None:
        tasks = load_game24(path)
    else:
        rows = _public_rows(benchmark.source) if path is None else local_rows(path)
        items = (benchmark.read(name, index, row) for index, row in enumerate(rows))
        tasks = [task for task in items if task is not None]
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"{benchmark.title}: the same id occurs twice in {path or benchmark.source.id}")
    counts = [count for count in (benchmark.count, benchmark.subset) if count is not None]
    if whole and len(tasks) not in counts:
        raise ValueError(
            f"{benchmark.title}: expected {' or '.join(map(str, counts))} items, found {len(tasks)} in "
            f"{path or benchmark.source.id}; use the original file, or --part for a part of it"
        )
    return tasks


def _public_rows(source: PublicSet) -> list[Row]:
    from datasets import load_dataset

    try:
        return list(load_dataset(source.id, source.config, split=source.split))
    except Exception as error:
        gated = "; it is gated: accept its terms and log in to the hub first" if source.gated else ""
        raise ValueError(
            f"the public data set {source.id} could not be loaded ({type(error).__name__}){gated}; "
            "or set --data to a folder with its file"
        ) from error
