"""What a run shows in TensorBoard: scalars, histograms and sampled trajectories, each with a line that explains it."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary, SummaryMetadata
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent
from tensorboard.plugins.histogram import metadata as histogram
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from ray_jobs.metrics import BY_NAME, Metric, title_of
from ray_jobs.metrics_distributions import HISTOGRAMS
from ray_jobs.metrics_layout import FIRST, LOGGED_ROWS
from ray_jobs.metrics_texts import TEXTS

Keeps = Callable[[str, int], bool]
"""Whether what was logged under a tag at a step is to stay."""


class Board:
    """Writes below one folder. Everything is on disk when a method returns: by itself the writer waits two minutes,
    too long for watching a run. Raises OSError where the disk does not take it."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder))
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
        self._writer.close()

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
            self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            self._writer.flush()


def rewind_board(folder: Path, keeps: Keeps) -> None:
    """Write the folder's files anew, as one, without what `keeps` says no to; nothing stands twice at one step.

    A crash on the way leaves old and new files side by side, which the next call mends. What follows the place where
    a file is damaged is lost.
    """
    old = sorted(folder.glob("events.out.tfevents.*"))
    if not old:
        return
    writer = EventFileWriter(str(folder))
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
            writer.add_event(Event(wall_time=event.wall_time, step=event.step, summary=Summary(value=stay)))
    writer.close()
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
                title=row.question,
                chart=[
                    Chart(title=panel.title, multiline=MultilineChartContent(tag=[f"^{name}$" for name in panel.names]))
                    for panel in row.panels
                ],
                closed=index > 1,
            )
            for index, row in enumerate(LOGGED_ROWS)
        ]
    )
    return Summary.Value(
        tag=custom_scalar.CONFIG_SUMMARY_TAG,
        metadata=custom_scalar.create_summary_metadata(),
        tensor=make_tensor_proto(layout.SerializeToString(), dtype=np.object_),
    )


def _sentence(says: str) -> str:
    return f"{says}." if says else ""
