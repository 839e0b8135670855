"""TensorBoard logs of a run (scalars, histograms, two trajectories of each train step), and experiment trackers."""

import importlib.util
import math
import os
import unicodedata
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from configs.api_keys import exposed_key, written_secret
from configs.errors import UserError
from configs.run import TrackerName
from rollout.filters import SOLVED
from rollout.numbers import unpacked
from rollout.records import StepHead, StepRecord, TurnRecord, read_records
from rollout.types import is_answer, versions_by_token

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PHASES_BEFORE_RL = ("cold_start", "train_prm")
"""Metric groups that count their own steps. Each has its own subfolder, which TensorBoard shows as a run."""

TEXTS: Mapping[str, str] = {
    "trajectories/right": "The first right trajectory of the step's first group, with the value of each decision",
    "trajectories/wrong": "The first wrong trajectory of the same group",
}
"""Descriptions of the logged texts."""

HISTOGRAMS: Mapping[str, str] = {
    "steps/advantage": "Advantage of each planner step",
    "steps/prm_score": "Score of the process reward model for each planner step",
    "steps/tokens": "Sampled tokens of each planner step",
    "steps/generate_s": "Seconds that each planner step waited for its completion",
    "steps/tool_s": "Seconds of each tool call",
    "trajectories/steps": "Planner steps of each trajectory",
    "tokens/staleness": "Age of each trained token: train steps since the weights that sampled it",
    "tokens/ratio": "Probability of each trained token under the learner over that under the engine that sampled it",
}
"""Descriptions of the logged histograms."""

MAX_CHARS = 600
"""Longest part of a text that is shown."""
MAX_TURNS = 40
MAX_LOG_RATIO = 20.0
MOST_COUNTED = 256
"""Trajectories of a train step that enter the histograms: enough tokens to show their distribution."""


class Board:
    """A writer of one TensorBoard folder."""

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        """Open a new event file. TensorBoard hides events that older files hold at `purge_step` and later."""
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}
        self._writer("", purge_step)

    def add_scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics by their names."""
        for name, value in metrics.items():
            group = name.partition("/")[0]
            self._writer(group if group in PHASES_BEFORE_RL else "").add_scalar(name, value, step)

    def add_histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Log the distribution of each array of finite numbers."""
        for name, numbers in values.items():
            self._writer("").add_histogram(name, numbers, step)

    def add_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Log Markdown, whose untrusted parts `plain` has escaped."""
        for name, text in texts.items():
            self._writer("").add_text(name, text, step)

    def flush(self) -> None:
        """Write all events to disk."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Write all events to disk and close the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, group: str, purge_step: int | None = 0) -> "SummaryWriter":
        # A phase before RL is logged from its first step on, so that a repeated one replaces all of it.
        if group not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(self._folder / group)
            self._writers[group] = SummaryWriter(folder, purge_step=purge_step, flush_secs=10)
        return self._writers[group]


class StepTexts:
    """The first right and the first wrong trajectory of the first trained group of a train step."""

    def __init__(self) -> None:
        self._kept: dict[str, StepRecord] = {}

    def wants(self, head: StepHead) -> bool:
        """Return whether the record with this head is one of the two."""
        groups = {record["group_id"] for record in self._kept.values()}
        return (
            head.get("verdict") == "trained"
            and head["outcome"] is not None
            and groups <= {head["group_id"]}
            and _text_of(head) not in self._kept
        )

    def add(self, record: StepRecord) -> None:
        """Keep a record that `wants` accepted."""
        self._kept[_text_of(record)] = record

    def texts(self) -> dict[str, str]:
        """Return Markdown by the names of `TEXTS`."""
        return {name: markdown_of(record) for name, record in self._kept.items()}


def _text_of(head: StepHead) -> str:
    return "trajectories/right" if head["outcome"] == SOLVED else "trajectories/wrong"


def markdown_of(record: StepRecord) -> str:
    """Render a trajectory as a Markdown table with a row for each planner turn."""
    turns = [turn for turn in record["turns"] if turn["role"] == "planner"]
    scores = record.get("prm_scores") or [None] * len(turns)
    rows = []
    for number, (turn, score, advantage) in enumerate(zip(turns, scores, record["advantages"], strict=True), 1):
        if turn["format_error"]:
            decision = f"malformed: {plain(turn['format_error'])}<br>{plain(turn['text'])}"
        else:
            thought = f"{plain(turn['thought'])}<br>" if turn["thought"] else ""
            decision = f"{thought}**{plain(turn['action'] or 'nothing')}** {plain(turn['action_input'] or '')}"
        result = f"error: {plain(turn['tool_error'])}" if turn["tool_error"] else plain(turn["result"] or "")
        shown = "" if score is None else f"{score:.2f}", "" if advantage is None else f"{advantage:+.2f}"
        rows.append(f"| {number} | {decision} | {result} | {shown[0]} | {shown[1]} |")
    if len(rows) > MAX_TURNS:
        rows[MAX_TURNS:] = [f"| ... | {len(rows) - MAX_TURNS} more steps | | | |"]
    answer = plain(record["answer"]) if is_answer(record["answer"]) else "none"
    reward = "" if record["reward"] is None else f"{record['reward']:.2f}"
    return "\n".join(
        (
            f"**Task** {plain(record['question'])}\n",
            f"**Answer** {answer} ({plain(record['stop_reason'])}); the reference is {plain(record['gold'])}; "
            f"reward {reward}\n",
            "| step | decision | result | PRM score | advantage |",
            "| --- | --- | --- | --- | --- |",
            *rows,
        )
    )


def plain(text: str) -> str:
    """Escape any text as Markdown without markup. Invisible characters, and those that change the direction of
    reading, become their code points."""
    shown = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} ... ({len(text)} characters)"
    return "".join(map(_escaped, shown))


def _escaped(character: str) -> str:
    if character.isalnum() or character == " ":
        return character
    if character == "\n":
        return "<br>"
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"&#91;U+{ord(character):04X}&#93;"
    return f"&#{ord(character)};"


class StepDistributions:
    """The values behind the histograms of one train step, over at most `MOST_COUNTED` evenly spaced trajectories."""

    def __init__(self, version_ages: Mapping[int, int], num_trained: int = 0) -> None:
        """Take the age in train steps of each policy version in the batch, and its number of trained trajectories."""
        self._version_ages = version_ages
        self._every = max(1, math.ceil(num_trained / MOST_COUNTED))
        self._num_seen = 0
        self._values: dict[str, list[np.ndarray]] = {name: [] for name in HISTOGRAMS}

    def wants(self, head: StepHead) -> bool:
        """Return whether the next record of the step, with this head, is counted."""
        if head.get("verdict") != "trained" or head["reward"] is None:
            return False
        self._num_seen += 1
        return (self._num_seen - 1) % self._every == 0

    def add(self, record: StepRecord) -> None:
        """Count a record that `wants` accepted."""
        planned = [turn for turn in record["turns"] if turn["role"] == "planner"]
        self._count("trajectories/steps", [len(planned)])
        trained = [turn["trainable"] for turn in planned]
        self._count("steps/advantage", list(compress(record["advantages"], trained)))
        self._count("steps/prm_score", list(compress(record.get("prm_scores", ()), trained)))
        for turn in compress(planned, trained):
            self._count("steps/tokens", [len(unpacked(turn["token_ids"]))])
            self._count("steps/generate_s", [turn["generate_s"]])
            self._count("steps/tool_s", [turn["tool_s"]] if turn["action"] is not None else [])
            learner = unpacked(turn.get("learner_logprobs", ()))
            if learner.size:
                # Untrained tokens have a log-prob of nan, and an age of nan if they are too old.
                gaps = learner - unpacked(turn["logprobs"])[: len(learner)]
                self._count("tokens/ratio", np.exp(np.clip(gaps, -MAX_LOG_RATIO, MAX_LOG_RATIO)))
                self._count("tokens/staleness", self._ages(turn))

    def histograms(self) -> dict[str, np.ndarray]:
        """Return the finite values by the names of `HISTOGRAMS`, without empty ones."""
        arrays = {name: np.concatenate([np.zeros(0), *parts]) for name, parts in self._values.items()}
        finite = {name: numbers[np.isfinite(numbers)] for name, numbers in arrays.items()}
        return {name: numbers for name, numbers in finite.items() if numbers.size}

    def _ages(self, turn: TurnRecord) -> np.ndarray:
        num, ages = len(unpacked(turn["token_ids"])), self._version_ages
        if not turn["switches"]:
            return np.full(num, ages.get(turn["policy_version"], math.nan))
        versions = versions_by_token(num, turn["policy_version"], turn["switches"])
        return np.array([ages.get(version, math.nan) for version in versions])

    def _count(self, name: str, values: Sequence[float | None] | np.ndarray) -> None:
        # None becomes nan.
        self._values[name].append(np.asarray(values, dtype=np.float64))


PROJECT, TRACKERS = "agentflow", "trackers"
Tracker = tuple[str, Callable[[int, Mapping[str, float]], object], Callable[[], object]]
"""The tracker's id of the run, a function that adds the metrics of a step, and one that closes the tracker."""


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Raise UserError for a tracker whose library is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"trackers = {name!r} needs its library: run `pip install 'agentflow-ray[{name}]'`")


def _wandb(folder: Path, name: str, known: str | None) -> Tracker:
    import wandb

    # Send only what TensorBoard shows: the command line and the environment may hold keys.
    quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False, "x_save_requirements": False}
    mode = os.environ.get("WANDB_MODE", "offline")
    settings = wandb.Settings(mode=mode, x_disable_stats=True, x_disable_meta=True, **quiet)
    place = {"project": PROJECT, "name": name, "id": known, "dir": str(folder), "resume": "allow"}
    run = wandb.init(**place, settings=settings, sync_tensorboard=True)
    return run.id, lambda step, metrics: None, run.finish


def _mlflow(folder: Path, name: str, known: str | None) -> Tracker:
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").as_uri())
    mlflow.set_experiment(PROJECT)
    run = mlflow.start_run(run_id=known, run_name=name)
    return run.info.run_id, lambda step, metrics: mlflow.log_metrics(dict(metrics), step=step), mlflow.end_run


def _trackio(folder: Path, name: str, known: str | None) -> Tracker:
    os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
    import trackio

    known = known or f"{name}-{uuid.uuid4().hex[:6]}"
    run = trackio.init(project=PROJECT, name=known, resume="allow", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    return known, lambda step, metrics: run.log(dict(metrics), step=step), run.finish


OPENERS = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


class Trackers:
    """The trackers of a run. One that fails is reported, and the run continues without it."""

    def __init__(self, folder: Path, names: Sequence[TrackerName], note: Callable[[str], None]) -> None:
        """Open the trackers. W&B sees only TensorBoard files that are opened later."""
        self.num_sent = 0
        """Rows of metrics.jsonl that the trackers have."""
        self._note, self._open = note, dict[str, Tracker]()
        for name in names:
            place, key = folder / TRACKERS / name, folder / TRACKERS / f"{name}.id"
            place.mkdir(parents=True, exist_ok=True)
            with self._guard(name):
                known = key.read_text(encoding="ascii") if key.exists() else None
                self._open[name] = OPENERS[name](place, folder.name, known)
                key.write_text(self._open[name][0], encoding="ascii")

    def settle(self, path: Path) -> None:
        """Send the new rows of metrics.jsonl, which no resume takes back any more."""
        rows = list(read_records(path)) if self._open else []
        for name in list(self._open):
            with self._guard(name):
                for row in rows[self.num_sent :]:
                    self._open[name][1](int(row["step"]), {key: value for key, value in row.items() if "/" in key})
        self.num_sent = len(rows)

    def close(self) -> None:
        """Close the trackers, which write what they still hold."""
        for name in list(self._open):
            with self._guard(name):
                self._open[name][2]()

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        try:
            yield
        # Another project's library may fail in any way, and some end the process.
        except (Exception, SystemExit) as error:
            self._open.pop(name, None)
            text = " ".join(str(error).split())[:200]
            quoted = "" if written_secret(text) or exposed_key(text) else f": {text}"
            self._note(f"tracker '{name}' stopped and the run continues without it: {type(error).__name__}{quoted}")
