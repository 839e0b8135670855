"""Ten benchmarks: their sources, their sizes, and the readers of their rows.

A row has the layout of the public data set, or the plain layout {id, question, answer}. The problems of AIME up to 2023
are for training too.
"""

import csv
import io
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from configs.errors import did_you_mean
from envs.datasets.game24 import PUBLIC_ID, load_game24
from envs.datasets.rows import Row, Split, local_rows
from envs.types import Task

SHORT = "Answer in a few words: a name, a number, a date, yes or no."
LETTER = "Answer with the letter alone."
GAIA = (
    "Answer with a number, as few words as possible, or a comma-separated list of these. Write no thousands separator "
    "and no unit unless it is asked for, no article and no abbreviation."
)
AIME_SOURCES: dict[Split, str] = {"train": "di-zhang-fdu/AIME_1983_2024", "eval": "Maxwell-Jia/AIME_2024"}
AIME_COUNTS: dict[Split, int] = {"train": 918, "eval": 30}
AIME_EVAL_YEAR = 2024
# Both 80 and 81 were accepted, so an exact scorer cannot decide.
AIME_EXCLUDED = "2022-II-8"

_OPTION = re.compile(r"^([A-J])[.)] +(\S.*)$", re.MULTILINE)
_AIME_ID = re.compile(r"([0-9]{4})-(?:I{1,2}-)?[0-9]{1,2}")
_AIME_URL = re.compile(r"/([0-9]{4})_AIME_(I{1,2})_Problems/Problem_([0-9]{1,2})$")

Reading = tuple[str, str]
"""Question and reference answer."""


def read_short_answer(row: Row) -> Reading:
    """Read a question with one or more accepted answers."""
    answers = _strings(row["golden_answers"] if "golden_answers" in row else row["answer"])
    aliases = dict.fromkeys(" ".join(text.split()) for text in (*answers, *_strings(row.get("aliases", []))))
    return f"{_text(row, 'question')}\n{SHORT}", "\n".join(filter(None, aliases))


def read_gaia(row: Row) -> Reading | None:
    """Read a question of GAIA; None for a question with an attachment, which is not text only."""
    if row.get("file_name"):
        return None
    question = _text(row, "Question" if "Question" in row else "question")
    [answer] = _strings(row["Final answer"] if "Final answer" in row else row["answer"])
    return f"{question}\n{GAIA}", " ".join(answer.split())


def read_number(row: Row) -> Reading:
    """Read a numeric answer without the `.0` that the column type adds to integers."""
    [answer] = _strings(row["answer"])
    return _text(row, "question"), re.sub(r"\.0+$", "", answer.strip())


def read_medqa(row: Row) -> Reading:
    """Read a multiple-choice question with a table of options, or with options in the question."""
    options = row.get("options")
    if isinstance(options, Mapping):
        return _choice(_text(row, "question"), dict(options), str(row["answer_idx"]))
    return _listed_choice(row)


def read_gpqa(row: Row) -> Reading:
    """Read a question of GPQA.

    The public rows have the right option first; here each question has a fixed random order.
    """
    if "Correct Answer" not in row:
        return _listed_choice(row)
    right = str(row["Correct Answer"]).strip()
    texts = [right, *(str(row[f"Incorrect Answer {number}"]).strip() for number in (1, 2, 3))]
    random.Random(f"gpqa|{row['Question']}").shuffle(texts)
    letters = dict(zip("ABCD", texts, strict=True))
    return _choice(_text(row, "Question"), letters, "ABCD"[texts.index(right)])


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


def _listed_choice(row: Row) -> Reading:
    """Read a question that lists its options, one `A. text` per line; the answer is a letter or an option."""
    question, answer = _text(row, "question"), str(row["answer"]).strip()
    options = dict(_OPTION.findall(question))
    letters = [letter for letter, text in options.items() if answer in (letter, text.strip())]
    if len(letters) != 1:
        raise ValueError(f"the answer {answer!r} is {len(letters)} of the options in the question")
    stem = question[: next(_OPTION.finditer(question)).start()].rstrip()
    return _choice(stem, options, letters[0])


def _choice(stem: str, options: Mapping[str, str], letter: str) -> Reading:
    if letter not in options:
        raise ValueError(f"{letter!r} is not one of the options {', '.join(options)}")
    lines = [f"{key}. {' '.join(options[key].split())}" for key in sorted(options)]
    return "\n".join((stem, *lines, LETTER)), lines[sorted(options).index(letter)]


def _text(row: Row, column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"a row needs a text in the column {column!r}; its columns are {', '.join(row)}")
    return text.strip()


def _strings(value: object) -> list[str]:
    """Return one or several values as texts; a null is an empty one."""
    return ["" if text is None else str(text) for text in (value if isinstance(value, list | tuple) else [value])]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One benchmark."""

    title: str
    source: str
    """Its data set of the Hugging Face hub."""
    split: str
    count: int
    """Number of items."""
    read: Callable[[Row], Reading | None] | None
    """Reads a row. AIME and Game of 24 have their loaders instead."""
    config: str | None = None
    subset: int | None = None
    """Number of items that AgentFlow evaluates on, if fewer."""
    file: str = ""
    """Name of its file in a folder of local data, if not NAME.jsonl."""


_flash_rag = partial(Benchmark, source="RUC-NLPIR/FlashRAG_datasets", read=read_short_answer)

BENCHMARKS = {
    "bamboogle": _flash_rag("Bamboogle", config="bamboogle", split="test", count=125),
    "2wiki": _flash_rag("2WikiMultihopQA", config="2wikimultihopqa", split="dev", count=12_576, subset=200),
    "hotpotqa": _flash_rag("HotpotQA", config="hotpotqa", split="dev", count=7_405, subset=100),
    "musique": _flash_rag("MuSiQue", config="musique", split="dev", count=2_417, subset=200),
    "gaia": Benchmark("GAIA, text only", "gaia-benchmark/GAIA", "validation", 127, read_gaia, config="2023_all"),
    "aime24": Benchmark("AIME 2024", AIME_SOURCES["eval"], "train", 30, None),
    "amc23": Benchmark("AMC 2023", "math-ai/amc23", "test", 40, read_number),
    "game24": Benchmark("Game of 24", PUBLIC_ID, "train", 1_362, None, subset=300, file="gameof24.jsonl"),
    "gpqa": Benchmark("GPQA Diamond", "Idavidrein/gpqa", "train", 198, read_gpqa, config="gpqa_diamond"),
    "medqa": Benchmark("MedQA", "GBaker/MedQA-USMLE-4-options", "test", 1_273, read_medqa, subset=200),
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
    path = None if folder is None else folder / (benchmark.file or f"{name}.jsonl")
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"{benchmark.title} needs the file '{path}'; omit --data to download it")
    if name == "aime24":
        tasks = [replace(task, dataset=name) for task in load_aime(path, split="eval", whole_file=False)]
    elif benchmark.read is None:
        tasks = load_game24(path)
    else:
        rows = local_rows(path) if path else _public_rows(benchmark.source, benchmark.config, benchmark.split)
        tasks = _read_tasks(name, benchmark.read, rows)
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"{benchmark.title}: the same id occurs twice in {path or benchmark.source}")
    if whole and len(tasks) not in (benchmark.count, benchmark.subset):
        counts = " or ".join(str(count) for count in (benchmark.count, benchmark.subset) if count)
        raise ValueError(
            f"{benchmark.title}: expected {counts} items, found {len(tasks)} in {path or benchmark.source}; use the "
            "original file, or --part for a part of it"
        )
    return tasks


def _read_tasks(name: str, read: Callable[[Row], Reading | None], rows: Iterable[Row]) -> list[Task]:
    tasks = []
    for index, row in enumerate(rows):
        try:
            reading = read(row)
        except ValueError as error:
            raise ValueError(f"{name} row {index}: {error}") from None
        if reading is None:
            continue
        question, answer = reading
        if not answer:
            raise ValueError(f"{name} row {index} has no reference answer")
        id = next((row[key] for key in ("id", "task_id", "Record ID") if row.get(key) not in (None, "")), index)
        tasks.append(Task(id=f"{id}", dataset=name, question=question, answer=answer))
    return tasks


def load_aime(path: Path | None = None, *, split: Split, whole_file: bool = True) -> list[Task]:
    """Load the problems of AIME of one split from a csv or jsonl file, or else from the public data set.

    With `whole_file` the number of problems must be the known one: results on a changed data set are not comparable.
    Raises ValueError for another number, for a repeated id, and for a row that is not an AIME problem.
    """
    rows: Iterable[Row]
    if path is not None and path.suffix == ".csv":
        rows = csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""))
    else:
        rows = local_rows(path) if path else _public_rows(AIME_SOURCES[split])
    tasks = []
    for problem in map(_aime_problem, rows):
        year = int(problem.id[:4])
        if problem.id != AIME_EXCLUDED and (year == AIME_EVAL_YEAR if split == "eval" else year < AIME_EVAL_YEAR):
            if not re.fullmatch("[0-9]{1,3}", problem.answer):
                raise ValueError(f"AIME {problem.id}: an answer must have 1 to 3 digits, got {problem.answer!r}")
            tasks.append(replace(problem, answer=str(int(problem.answer))))
    source, expected = path or AIME_SOURCES[split], AIME_COUNTS[split]
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"AIME {split}: the same problem id occurs twice in {source}")
    if whole_file and len(tasks) != expected:
        raise ValueError(f"AIME {split}: expected {expected} problems, found {len(tasks)} in {source}")
    return tasks


def _aime_problem(row: Row) -> Task:
    """Read a problem from the columns of the three known layouts."""
    question = next((row[name] for name in ("Question", "Problem", "problem") if name in row), None)
    url = _AIME_URL.search(str(row.get("url")))
    id = str(row["ID"]) if "ID" in row else "-".join(url.groups()) if url else ""
    if not _AIME_ID.fullmatch(id) or not isinstance(question, str) or not question.strip():
        raise ValueError(
            "an AIME row needs ID/Question/Answer, ID/Problem/Answer or url/problem/answer, and an id such as "
            f"2022-II-8, got {row!r:.200}"
        )
    return Task(id=id, dataset="aime", question=question, answer=str(row.get("Answer", row.get("answer"))))


def _public_rows(source: str, config: str | None = None, split: str = "train") -> list[Row]:
    from datasets import load_dataset

    try:
        return list(load_dataset(source, config, split=split))
    except Exception as error:
        raise ValueError(
            f"the public data set {source} could not be loaded ({type(error).__name__}); if it is gated, accept its "
            "terms and log in to the hub, or use a local file: --data FOLDER, or envs.data_path"
        ) from error
