"""Ten benchmarks: their sources, their sizes, and the readers of their rows.

A row has the layout of the public data set, or the plain layout {id, question, answer}. The problems of AIME up to 2023
are for training too.
"""

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from configs.errors import UserError, did_you_mean, listed
from envs.datasets.game24 import PUBLIC_ID, load_game24
from envs.datasets.rows import Row, Split, local_rows, public_rows, read_tasks
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

_OPTION = re.compile(r"\s*\(?([A-J])[.):](?:\s+(.*))?")
_AIME_ID = re.compile(r"([0-9]{4})-(?:I{1,2}-)?[0-9]{1,2}")
_AIME_URL = re.compile(r"/([0-9]{4})_AIME_(I{1,2})_Problems/Problem_([0-9]{1,2})$")

Reading = tuple[str, str]
"""Question and reference answer."""


def read_short_answer(row: Row) -> Reading:
    """Read a question with one or more accepted answers."""
    answers = _answers(row, "golden_answers", "answer")
    aliases = _texts([*answers, *_strings(row.get("aliases")), *_strings(row.get("answer_aliases"))])
    return f"{_text(row, 'question')}\n{SHORT}", "\n".join(aliases)


def read_gaia(row: Row) -> Reading | None:
    """Read a question of GAIA; None for a question with an attachment, which is not text only."""
    if row.get("file_name"):
        return None
    return f"{_text(row, 'Question', 'question')}\n{GAIA}", _answer(row, "Final answer", "answer")


def read_number(row: Row) -> Reading:
    """Read a numeric answer without the `.0` that the column type adds to integers."""
    return _text(row, "question"), re.sub(r"\.0+$", "", _answer(row, "answer"))


def read_medqa(row: Row) -> Reading:
    """Read a multiple-choice question with a table of options, or with options in the question."""
    options = row.get("options")
    if not isinstance(options, Mapping):
        return _listed_choice(row)
    texts = {str(letter): text for letter, value in options.items() for text in _texts(_strings(value))}
    return _choice(_text(row, "question"), texts, _answer(row, "answer_idx"))


def read_gpqa(row: Row) -> Reading:
    """Read a question of GPQA; the options of a public row, the right one first, get a fixed random order."""
    if "Correct Answer" not in row:
        return _listed_choice(row)
    texts = [_text(row, name) for name in ("Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))]
    right = texts[0]
    random.Random(f"gpqa|{row['Question']}").shuffle(texts)
    return _choice(_text(row, "Question"), dict(zip("ABCD", texts, strict=True)), "ABCD"[texts.index(right)])


def names_its_form(question: str) -> bool:
    """Return whether a question ends with the required form of its answer, as those of benchmarks do."""
    return question.rpartition("\n")[2] in (SHORT, LETTER, GAIA)


def stem_of(question: str) -> str:
    """Return the question without the options and the required form of the answer below it."""
    lines = question.split("\n")
    if names_its_form(question):
        lines.pop()
    return "\n".join(lines[: min(_options_in(lines).values(), default=len(lines))]).rstrip()


def _options_in(lines: Sequence[str]) -> dict[str, int]:
    """Return the line at which each option begins, of the last list of options in a question; empty without one."""
    begins = [(found[1], index) for index, line in enumerate(lines) if (found := _OPTION.fullmatch(line))]
    for start in reversed([number for number, (letter, _) in enumerate(begins) if letter == "A"]):
        options: dict[str, int] = {}
        for letter, index in begins[start:]:
            if letter == chr(ord("A") + len(options)):
                options[letter] = index
        if len(options) > 1:
            return options
    return {}


def _listed_choice(row: Row) -> Reading:
    """Read a question that lists its options, each from a line `A. text` on; the answer is a letter or an option.

    The question stays as it is written: lines below the last option may belong to it or to the question.
    """
    question, answer = _text(row, "question"), _answer(row, "answer")
    lines, right = question.split("\n"), {}
    options = _options_in(lines)
    for (letter, begin), end in zip(options.items(), [*options.values(), len(lines)][1:], strict=True):
        first = lines[begin].lstrip(" \t(")[2:]
        whole = " ".join([first, *lines[begin + 1 : end]])
        for text in _texts((first, whole) if end < len(lines) else (whole, first)):
            if answer.strip("(.):") == letter or answer in (text, f"{letter}. {text}", f"{letter}) {text}"):
                right[letter] = f"{letter}. {text}"
    if len(right) != 1:
        raise ValueError(f"the answer {answer!r} is {len(right)} of the options in the question")
    return f"{question}\n{LETTER}", right.popitem()[1]


def _choice(stem: str, options: Mapping[str, str], letter: str) -> Reading:
    if letter not in options:
        raise ValueError(f"{letter!r} is not one of the options {', '.join(options)}")
    lines = {key: f"{key}. {' '.join(options[key].split())}" for key in sorted(options)}
    return "\n".join((stem, *lines.values(), LETTER)), lines[letter]


def _text(row: Row, *columns: str) -> str:
    text = _value(row, columns)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the column {listed(columns)} needs a text; the row has {', '.join(map(str, row))}")
    return text.strip()


def _answers(row: Row, *columns: str) -> list[str]:
    """Return the accepted answers in the first of these columns that the row has."""
    if not (answers := _texts(_strings(_value(row, columns)))):
        raise ValueError(f"the column {listed(columns)} needs an answer; the row has {', '.join(map(str, row))}")
    return answers


def _answer(row: Row, *columns: str) -> str:
    if len(answers := _answers(row, *columns)) > 1:
        raise ValueError(f"the column {listed(columns)} needs one answer, got {answers!r:.80}")
    return answers[0]


def _value(row: Row, columns: Sequence[str]) -> object:
    return next((row[column] for column in columns if column in row), None)


def _texts(texts: Iterable[str]) -> list[str]:
    """Return the different texts that are not blank, on one line each."""
    return [*filter(None, dict.fromkeys(" ".join(text.split()) for text in texts))]


def _strings(value: object) -> list[str]:
    """Return one or several texts and numbers as texts; a null is an empty one. Raises ValueError for anything else."""
    values = value if isinstance(value, list | tuple) else [value]
    if wrong := [one for one in values if isinstance(one, bool) or not isinstance(one, str | int | float | None)]:
        raise ValueError(f"an answer or an option must be a text or a number, got {wrong[0]!r:.80}")
    return ["" if one is None else str(one) for one in values]


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
    UserError for an unknown name, ValueError, and FileNotFoundError if the folder lacks the file.
    """
    if name not in BENCHMARKS:
        raise UserError(f"unknown benchmark {name!r}; known: {', '.join(BENCHMARKS)}{did_you_mean(name, BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    path = None if folder is None else folder / (benchmark.file or f"{name}.jsonl")
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"{benchmark.title} needs the file '{path}'; omit --data to download it")
    if name == "aime24":
        tasks = [replace(task, dataset=name) for task in load_aime(path, split="eval", whole_file=False)]
    elif benchmark.read is None:
        tasks = load_game24(path)
    else:
        rows = local_rows(path) if path else public_rows(benchmark.source, benchmark.config, benchmark.split)
        tasks = read_tasks(rows, path or benchmark.source, partial(_benchmark_task, name, benchmark.read))
    counts = [count for count in (benchmark.count, benchmark.subset) if count] if whole else []
    return _checked(tasks, f"{benchmark.title} in {path or benchmark.source}", counts)


def _checked(tasks: list[Task], name: str, counts: Sequence[int]) -> list[Task]:
    """Return the tasks. Raise ValueError for a repeated id, or if their number is none of `counts`."""
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"{name}: the same id occurs twice")
    if counts and len(tasks) not in counts:
        raise ValueError(
            f"{name}: expected {' or '.join(map(str, counts))} items, found {len(tasks)}; use the original file, or in "
            "`agentflow evaluate` --part for a part of it"
        )
    return tasks


def _benchmark_task(name: str, read: Callable[[Row], Reading | None], row: Row, index: int) -> Task | None:
    id = next((row[key] for key in ("id", "task_id", "Record ID") if row.get(key) not in (None, "")), index)
    reading = read(row)
    return reading and Task(id=f"{id}", dataset=name, question=reading[0], answer=reading[1])


def load_aime(path: Path | None = None, *, split: Split, whole_file: bool = True) -> list[Task]:
    """Load the problems of AIME of one split from a csv or jsonl file, or else from the public data set.

    With `whole_file` their number must be the known one. Raises ValueError.
    """
    source = path or AIME_SOURCES[split]
    rows = local_rows(path) if path else public_rows(AIME_SOURCES[split])
    tasks = read_tasks(rows, source, partial(_aime_problem, split))
    return _checked(tasks, f"AIME {split} in {source}", [AIME_COUNTS[split]] if whole_file else [])


def _aime_problem(split: Split, row: Row, index: int) -> Task | None:
    """Read a problem; None for one of another split. Without a year in its id it is for evaluation only."""
    url = _AIME_URL.search(str(row.get("url")))
    id = "-".join(url.groups()) if url else str(row.get("ID", row.get("id", index)))
    has_year = _AIME_ID.fullmatch(id)
    if not has_year and split == "train":
        raise ValueError(f"an AIME row needs `url`, or an `ID` with its year such as 2022-II-8, got {row!r:.200}")
    year = int(id[:4]) if has_year else AIME_EVAL_YEAR
    if id == AIME_EXCLUDED or (year != AIME_EVAL_YEAR if split == "eval" else year >= AIME_EVAL_YEAR):
        return None
    answers = _strings(row.get("Answer", row.get("answer")))
    if len(answers) != 1 or not re.fullmatch("[0-9]{1,3}", answers[0]):
        raise ValueError(f"AIME {id}: an answer must have 1 to 3 digits, got {answers!r:.80}")
    question = _text(row, "Question", "Problem", "problem", "question")
    return Task(id=id, dataset="aime", question=question, answer=str(int(answers[0])))
