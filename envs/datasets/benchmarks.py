"""The ten benchmarks by name: where they come from, how many items they have, and how a row of theirs becomes a task: a
row of the public data set, or of the plain layout {id, question, answer}."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.errors import did_you_mean
from envs.datasets.aime import PUBLIC_IDS, load_aime
from envs.datasets.game24 import PUBLIC_ID, load_game24
from envs.datasets.rows import PublicSet, Row, local_rows, public_rows
from envs.types import Task

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """`count` is the whole benchmark; `subset` the part that AgentFlow evaluates on, where that is less.

    With `asks_facts` most items can only be answered by who can search the world outside. `read` makes a task of a
    row, from the benchmark's name and the row's number; None where another data set of ours has the same rows.
    """

    title: str
    file: str
    source: PublicSet
    count: int
    subset: int | None = None
    asks_facts: bool = False
    read: Callable[[str, int, Row], Task | None] | None = None


def _flash_rag(title: str, file: str, config: str, split: str, count: int, subset: int | None = None) -> Benchmark:
    source = PublicSet(id="RUC-NLPIR/FlashRAG_datasets", config=config, split=split)
    return Benchmark(
        title=title, file=file, source=source, count=count, subset=subset, asks_facts=True, read=read_short_answer
    )


BENCHMARKS = {
    "bamboogle": _flash_rag("Bamboogle", "bamboogle.jsonl", "bamboogle", "test", 125),
    "2wiki": _flash_rag("2WikiMultihopQA", "2wiki.jsonl", "2wikimultihopqa", "dev", 12_576, 200),
    "hotpotqa": _flash_rag("HotpotQA", "hotpotqa.jsonl", "hotpotqa", "dev", 7_405, 100),
    "musique": _flash_rag("MuSiQue", "musique.jsonl", "musique", "dev", 2_417, 200),
    "gaia": Benchmark(
        title="GAIA, text only",
        file="gaia.jsonl",
        source=PublicSet(id="gaia-benchmark/GAIA", config="2023_all", split="validation", gated=True),
        count=127,
        asks_facts=True,
        read=read_gaia,
    ),
    "aime24": Benchmark(
        title="AIME 2024", file="aime24.jsonl", source=PublicSet(id=PUBLIC_IDS["eval"], split="train"), count=30
    ),
    "amc23": Benchmark(
        title="AMC 2023",
        file="amc23.jsonl",
        source=PublicSet(id="math-ai/amc23", split="test"),
        count=40,
        read=read_number,
    ),
    "game24": Benchmark(
        title="Game of 24",
        file="gameof24.jsonl",
        source=PublicSet(id=PUBLIC_ID, split="train"),
        count=1_362,
        subset=300,
    ),
    "gpqa": Benchmark(
        title="GPQA Diamond",
        file="gpqa.jsonl",
        source=PublicSet(id="Idavidrein/gpqa", config="gpqa_diamond", split="train", gated=True),
        count=198,
        read=read_gpqa,
    ),
    "medqa": Benchmark(
        title="MedQA",
        file="medqa.jsonl",
        source=PublicSet(id="GBaker/MedQA-USMLE-4-options", split="test"),
        count=1_273,
        subset=200,
        read=read_medqa,
    ),
}


def load_benchmark(name: str, folder: Path | None, *, whole: bool = True) -> list[Task]:
    """All items of a benchmark, from its file in `folder`, or from the public data set.

    With `whole` their number must be the known one: a benchmark that lost or gained items would silently change what
    a result means. Raises ValueError for another number, for an id that occurs twice, and for a row that is no item;
    FileNotFoundError where the folder lacks the file.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}{did_you_mean(name, BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    path = None if folder is None else folder / benchmark.file
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"{benchmark.title} needs the file '{path}'; leave --data out to download it")
    if name == "aime24":
        tasks = [replace(task, dataset=name) for task in load_aime(path, split="eval", whole_file=False)]
    elif benchmark.read is None:
        tasks = load_game24(path)
    else:
        rows = public_rows(benchmark.source) if path is None else local_rows(path)
        read = (benchmark.read(name, index, row) for index, row in enumerate(rows))
        tasks = [task for task in read if task is not None]
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"{benchmark.title}: the same id occurs twice in {path or benchmark.source.id}")
    counts = [count for count in (benchmark.count, benchmark.subset) if count is not None]
    if whole and len(tasks) not in counts:
        raise ValueError(
            f"{benchmark.title}: expected {' or '.join(map(str, counts))} items, found {len(tasks)} in "
            f"{path or benchmark.source.id}; use the original file, or --part for a part of it"
        )
    return tasks
