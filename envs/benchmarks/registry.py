"""The ten benchmarks by name: where they come from, how many items they have, what they ask."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from configs.errors import did_you_mean
from envs.benchmarks import readers
from envs.benchmarks.readers import PublicSet, Row, local_rows, public_rows
from envs.datasets.aime import PUBLIC_IDS, load_aime
from envs.datasets.game24 import PUBLIC_ID, load_game24
from envs.types import Task

ReadRow = Callable[[str, int, Row], Task | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """`count` is the whole benchmark; `subset` the part that AgentFlow evaluates on, where that is less.

    `answers` says what is compared: it decides the scorer, and whether a language model may be asked besides. With
    `asks_facts` most items can only be answered by who can search the world outside.
    """

    name: str
    title: str
    file: str
    source: PublicSet
    count: int
    subset: int | None = None
    answers: str
    asks_facts: bool = False
    read: ReadRow | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.count,) if self.subset is None else (self.count, self.subset)


def _flash_rag(config: str, split: str) -> PublicSet:
    return PublicSet(id="RUC-NLPIR/FlashRAG_datasets", config=config, split=split)


_ALL = (
    Benchmark(
        name="bamboogle",
        title="Bamboogle",
        file="bamboogle.jsonl",
        source=_flash_rag("bamboogle", "test"),
        count=125,
        answers="short text",
        asks_facts=True,
        read=readers.read_short_answer,
    ),
    Benchmark(
        name="2wiki",
        title="2WikiMultihopQA",
        file="2wiki.jsonl",
        source=_flash_rag("2wikimultihopqa", "dev"),
        count=12_576,
        subset=200,
        answers="short text",
        asks_facts=True,
        read=readers.read_short_answer,
    ),
    Benchmark(
        name="hotpotqa",
        title="HotpotQA",
        file="hotpotqa.jsonl",
        source=_flash_rag("hotpotqa", "dev"),
        count=7_405,
        subset=100,
        answers="short text",
        asks_facts=True,
        read=readers.read_short_answer,
    ),
    Benchmark(
        name="musique",
        title="MuSiQue",
        file="musique.jsonl",
        source=_flash_rag("musique", "dev"),
        count=2_417,
        subset=200,
        answers="short text",
        asks_facts=True,
        read=readers.read_short_answer,
    ),
    Benchmark(
        name="gaia",
        title="GAIA, text only",
        file="gaia.jsonl",
        source=PublicSet(id="gaia-benchmark/GAIA", config="2023_all", split="validation", gated=True),
        count=127,
        answers="quasi-exact",
        asks_facts=True,
        read=readers.read_gaia,
    ),
    Benchmark(
        name="aime24",
        title="AIME 2024",
        file="aime24.jsonl",
        source=PublicSet(id=PUBLIC_IDS["eval"], split="train"),
        count=30,
        answers="integer from 0 to 999",
    ),
    Benchmark(
        name="amc23",
        title="AMC 2023",
        file="amc23.jsonl",
        source=PublicSet(id="math-ai/amc23", split="test"),
        count=40,
        answers="number",
        read=readers.read_number,
    ),
    Benchmark(
        name="game24",
        title="Game of 24",
        file="gameof24.jsonl",
        source=PublicSet(id=PUBLIC_ID, split="train"),
        count=1_362,
        subset=300,
        answers="expression",
    ),
    Benchmark(
        name="gpqa",
        title="GPQA Diamond",
        file="gpqa.jsonl",
        source=PublicSet(id="Idavidrein/gpqa", config="gpqa_diamond", split="train", gated=True),
        count=198,
        answers="letter",
        read=readers.read_gpqa,
    ),
    Benchmark(
        name="medqa",
        title="MedQA",
        file="medqa.jsonl",
        source=PublicSet(id="GBaker/MedQA-USMLE-4-options", split="test"),
        count=1_273,
        subset=200,
        answers="letter",
        read=readers.read_medqa,
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _ALL}


def load_benchmark(name: str, folder: Path | None = None, *, whole: bool = True) -> list[Task]:
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
    tasks = _tasks(benchmark, path)
    if len({task.id for task in tasks}) != len(tasks):
        raise ValueError(f"{benchmark.title}: the same id occurs twice in {path or benchmark.source.id}")
    if whole and len(tasks) not in benchmark.counts:
        wanted = " or ".join(map(str, benchmark.counts))
        raise ValueError(
            f"{benchmark.title}: expected {wanted} items, found {len(tasks)} in {path or benchmark.source.id}; "
            "use the original file, or --part for a part of it"
        )
    return tasks


def _tasks(benchmark: Benchmark, path: Path | None) -> list[Task]:
    if benchmark.name == "aime24":
        return [replace(task, dataset=benchmark.name) for task in load_aime(path, split="eval", whole_file=False)]
    if benchmark.name == "game24":
        return load_game24(path)
    assert benchmark.read is not None
    rows = public_rows(benchmark.source) if path is None else local_rows(path)
    read = (benchmark.read(benchmark.name, index, row) for index, row in enumerate(rows))
    return [task for task in read if task is not None]
