"""What a run shows in TensorBoard: scalars, histograms and sampled trajectories, each explained in a line."""

import math
import os
import socket
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary, SummaryMetadata
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)
from tensorboard.plugins.histogram import metadata as histogram
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

from ray_jobs.metrics.table import BY_NAME, CHARTS, FIRST, INTERVALS, Metric, title_of
from rollout.filters import SOLVED
from rollout.numbers import unpacked
from rollout.records import StepHead, StepRecord, TurnRecord
from rollout.types import is_answer, versions_by_token

TEXTS: Mapping[str, str] = {
    "trajectories/right": "The first right trajectory of the step's first group, with what each decision was worth",
    "trajectories/wrong": "The first wrong trajectory of the same group",
}
"""Every text with one line on what it shows."""

MAX_CHARS = 600
"""Of one piece of text."""
MAX_TURNS = 40

_HEADER = "| step | decision | result | PRM score | advantage |\n| --- | --- | --- | --- | --- |"


class StepTexts:
    """Looks at the records of one step, one by one, and keeps two of them."""

    def __init__(self) -> None:
        self._kept: dict[str, StepRecord] = {}

    def wants(self, head: StepHead) -> bool:
        """Whether the record with this head is one of those two."""
        groups = {one["group_id"] for one in self._kept.values()}
        return (
            head.get("verdict") == "trained"
            and head["outcome"] is not None
            and groups <= {head["group_id"]}
            and _text_of(head) not in self._kept
        )

    def add(self, record: StepRecord) -> None:
        self._kept[_text_of(record)] = record

    def texts(self) -> dict[str, str]:
        """Markdown by the names of `TEXTS`."""
        return {name: markdown_of(record) for name, record in self._kept.items()}


def _text_of(head: StepHead) -> str:
    return "trajectories/right" if head["outcome"] == SOLVED else "trajectories/wrong"


def markdown_of(record: StepRecord) -> str:
    """A trajectory as a table: a row for each planner turn."""
    turns = [turn for turn in record["turns"] if turn["role"] == "planner"]
    scores = record.get("prm_scores") or [None] * len(turns)
    rows = [
        f"| {number} | {_decision(turn)} | {_result(turn)} | {_number(score)} | {_number(advantage, signed=True)} |"
        for number, (turn, score, advantage) in enumerate(zip(turns, scores, record["advantages"], strict=True), 1)
    ]
    if len(rows) > MAX_TURNS:
        rows[MAX_TURNS:] = [f"| ... | {len(rows) - MAX_TURNS} more steps | | | |"]
    answer = plain(record["answer"]) if is_answer(record["answer"]) else "none"
    return "\n".join(
        (
            f"**Task** {plain(record['question'])}\n",
            f"**Answer** {answer} ({plain(record['stop_reason'])}); the reference is {plain(record['gold'])}; "
            f"reward {_number(record['reward'])}\n",
            _HEADER,
            *rows,
        )
    )


def plain(text: str) -> str:
    """Any text as Markdown that shows its characters and means nothing else. What cannot be seen, and what turns the
    direction of reading, is shown by its number."""
    cut = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... ({len(text)} characters)"
    return "".join(map(_shown, cut))


def _shown(character: str) -> str:
    if character.isalnum() or character == " ":
        return character
    if character == "\n":
        return "<br>"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"&#91;U+{ord(character):04X}&#93;"
    return f"&#{ord(character)};"


def _decision(turn: TurnRecord) -> str:
    if turn["format_error"]:
        return f"malformed: {plain(turn['format_error'])}<br>{plain(turn['text'])}"
    thought = f"{plain(turn['thought'])}<br>" if turn["thought"] else ""
    return f"{thought}**{plain(turn['action'] or 'nothing')}** {plain(turn['action_input'] or '')}"


def _result(turn: TurnRecord) -> str:
    if turn["tool_error"]:
        return f"error: {plain(turn['tool_error'])}"
    return plain(turn["result"] or "")


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.2f}" if signed else f"{value:.2f}"


MAX_LOG_RATIO = 20.0
NUM_BUCKETS = 30
MOST_COUNTED = 256
"""Trajectories of a step: thousands of tokens, which show a distribution as well as all of them."""

HISTOGRAMS: Mapping[str, str] = {
    "steps/advantage": "Advantage of each planner step",
    "steps/prm_score": "Score of the process reward model for each planner step",
    "steps/tokens": "Sampled tokens of each planner step",
    "steps/generate_s": "Seconds that each planner step waited for its completion",
    "steps/tool_s": "Seconds of each tool call",
    "trajectories/steps": "Planner steps of each trajectory",
    "tokens/staleness": "Age of each trained token in train steps: those since the weights that sampled it",
    "tokens/ratio": "Probability of each trained token under the learner over that under the engine that sampled it",
}
"""Every distribution with one line on what it counts."""

_WHOLE = {"steps/tokens", "trajectories/steps", "tokens/staleness"}
"""Those of whole numbers."""


class StepDistributions:
    """Looks at the records of one step, one by one. `version_ages` are those of their batch. Of `num_trained` that were
    trained it counts `MOST_COUNTED` at most, evenly spread."""

    def __init__(self, version_ages: Mapping[int, int], num_trained: int = 0) -> None:
        self._version_ages = version_ages
        self._every = max(1, math.ceil(num_trained / MOST_COUNTED))
        self._num_seen = 0
        self._values: dict[str, list[np.ndarray]] = {name: [] for name in HISTOGRAMS}

    def wants(self, head: StepHead) -> bool:
        """Whether the record with this head, the next one of the step, is counted."""
        if head.get("verdict") != "trained" or head["reward"] is None:
            return False
        self._num_seen += 1
        return (self._num_seen - 1) % self._every == 0

    def histograms(self) -> dict[str, np.ndarray]:
        """By the names of `HISTOGRAMS`, those with anything in them: `[K, 3]`, left edge, right edge and count of
        each bucket. What is not a number is left out."""
        made = ((name, _buckets(parts, whole=name in _WHOLE)) for name, parts in self._values.items())
        return {name: buckets for name, buckets in made if buckets is not None}

    def add(self, record: StepRecord) -> None:
        planned = [turn for turn in record["turns"] if turn["role"] == "planner"]
        self._count("trajectories/steps", [len(planned)])
        # Turns that are not trainable are left out.
        trained = [turn["trainable"] for turn in planned]
        self._count("steps/advantage", list(compress(record["advantages"], trained)))
        self._count("steps/prm_score", list(compress(record.get("prm_scores", ()), trained)))
        turns = list(compress(planned, trained))
        self._count("steps/tokens", [len(unpacked(turn["token_ids"])) for turn in turns])
        self._count("steps/generate_s", [turn["generate_s"] for turn in turns])
        self._count("steps/tool_s", [turn["tool_s"] for turn in turns if turn["action"] is not None])
        for turn in turns:
            ratios = _ratios(turn)
            self._count("tokens/ratio", ratios)
            # Of a turn that was not trained there are none.
            if ratios.size:
                self._count("tokens/staleness", self._ages(turn))

    def _ages(self, turn: TurnRecord) -> np.ndarray:
        """Of each token, nan where it was too old to be trained."""
        num, ages = len(unpacked(turn["token_ids"])), self._version_ages
        if not turn["switches"]:
            return np.full(num, ages.get(turn["policy_version"], math.nan))
        versions = versions_by_token(num, turn["policy_version"], turn["switches"])
        return np.array([ages.get(version, math.nan) for version in versions])

    def _count(self, name: str, values: Sequence[float | None] | np.ndarray) -> None:
        """None becomes nan."""
        self._values[name].append(np.asarray(values, dtype=np.float64))


def _ratios(turn: TurnRecord) -> np.ndarray:
    """Nan at tokens that were not trained: they have no log-prob of the learner's."""
    learner = unpacked(turn.get("learner_logprobs", ()))
    if not learner.size:
        return learner
    gaps = learner - unpacked(turn["logprobs"])[: len(learner)]
    return np.exp(np.clip(gaps, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _buckets(parts: Sequence[np.ndarray], *, whole: bool) -> np.ndarray | None:
    """None over nothing. Whole numbers get a bucket each, as long as they are few."""
    numbers = np.concatenate([np.zeros(0), *parts])
    numbers = numbers[np.isfinite(numbers)]
    if not numbers.size:
        return None
    low, high = numbers.min(), numbers.max()
    if whole and high - low < NUM_BUCKETS:
        edges = np.arange(low, high + 2) - 0.5
    else:
        edges = np.linspace(low, high, NUM_BUCKETS + 1) if high > low else np.array([low - 0.5, low + 0.5])
    counts, _ = np.histogram(numbers, edges)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)


Keeps = Callable[[str, int], bool]
"""Whether what was logged under a tag at a step is to stay."""


class EventFile:
    """A new file of events, which TensorBoard finds by its name. TensorBoard's own writer writes in a thread, where a
    full disk is a traceback; this one raises OSError to the caller."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        written = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / written).open("xb")
        self._records = RecordWriter(self._file)
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: Event) -> None:
        """On disk when this returns."""
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Board:
    """Writes below one folder. Everything is on disk when a method returns. Raises OSError where the disk does not
    take it."""

    def __init__(self, folder: Path) -> None:
        self._events = EventFile(folder)
        self._described: set[str] = set()
        self._write(0, [_layout()])

    def add_scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        tags = [(tag, name) for name in metrics for tag in (name, FIRST.get(name)) if tag]
        self._write(step, [self._scalar(tag, metrics[name], BY_NAME.get(name)) for tag, name in tags])

    def add_histograms(self, step: int, histograms: Mapping[str, np.ndarray]) -> None:
        """`[K, 3]` each: left edge, right edge, count."""
        self._write(step, [_histogram(name, buckets) for name, buckets in histograms.items()])

    def add_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Markdown; what is not to be trusted in it was made harmless before."""
        self._write(step, [text_pb(name, text, TEXTS.get(name)).value[0] for name, text in texts.items()])

    def close(self) -> None:
        self._events.close()

    def _scalar(self, tag: str, value: float, metric: Metric | None) -> Summary.Value:
        """TensorBoard reads the description off the first value of a tag."""
        said = SummaryMetadata()
        if tag not in self._described and metric:
            said = scalar.create_summary_metadata(display_name=metric.title, description=_sentence(metric.says))
            # Without it TensorBoard takes a plain number for one from before there were descriptions, and drops them.
            said.data_class = DATA_CLASS_SCALAR
        self._described.add(tag)
        return Summary.Value(tag=tag, simple_value=value, metadata=said)

    def _write(self, step: int, values: list[Summary.Value]) -> None:
        if values:
            self._events.add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def rewind_board(folder: Path, keeps: Keeps) -> None:
    """Write the folder's files anew, as one, without what `keeps` says no to; nothing stands twice at one step.

    A crash on the way leaves old and new files side by side, which the next call mends. What follows the place where
    a file is damaged is lost.
    """
    old = sorted(folder.glob("events.out.tfevents.*"))
    if not old:
        return
    anew = EventFile(folder)
    seen: set[tuple[str, int]] = set()
    for event in (event for path in old for event in _events(path)):
        stay = [
            value
            for value in event.summary.value
            if value.tag != custom_scalar.CONFIG_SUMMARY_TAG
            and (value.tag, event.step) not in seen
            and keeps(value.tag, event.step)
        ]
        seen.update((value.tag, event.step) for value in stay)
        if stay:
            anew.add(Event(wall_time=event.wall_time, step=event.step, summary=Summary(value=stay)))
    anew.close()
    for path in old:
        path.unlink()


def _events(path: Path) -> Iterator[Event]:
    """Those that hold values; the last one may be cut off."""
    for data in RawEventFileLoader(str(path)).Load():
        event = Event.FromString(data)
        if event.HasField("summary"):
            yield event


def _histogram(name: str, buckets: np.ndarray) -> Summary.Value:
    said = histogram.create_summary_metadata(
        display_name=title_of(name), description=_sentence(HISTOGRAMS.get(name, ""))
    )
    return Summary.Value(tag=name, metadata=said, tensor=make_tensor_proto(buckets, dtype=np.float64))


def _layout() -> Summary.Value:
    """The charts of the tab of custom scalars: metrics that answer one question, together."""
    layout = Layout(
        category=[
            Category(
                title=question,
                chart=[_chart(title, names) for title, names in charts.items()],
                closed=index > 1,
            )
            for index, (question, charts) in enumerate(CHARTS.items())
        ]
    )
    return Summary.Value(
        tag=custom_scalar.CONFIG_SUMMARY_TAG,
        metadata=custom_scalar.create_summary_metadata(),
        tensor=make_tensor_proto(layout.SerializeToString(), dtype=np.object_),
    )


def _chart(title: str, names: Sequence[str]) -> Chart:
    """Lines, or one with its interval."""
    if names[0] not in INTERVALS:
        return Chart(title=title, multiline=MultilineChartContent(tag=[f"^{name}$" for name in names]))
    lower, upper = INTERVALS[names[0]]
    series = MarginChartContent.Series(value=names[0], lower=lower, upper=upper)
    return Chart(title=title, margin=MarginChartContent(series=[series]))


def _sentence(says: str) -> str:
    return f"{says}." if says else ""
