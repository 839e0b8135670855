"""TensorBoard logs of a run, and experiment trackers."""

import importlib.util
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from configs.api_keys import exposed_key, without_secrets
from configs.errors import UserError
from configs.run import TrackerName
from rollout.files import read_records

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PHASES_BEFORE_RL = ("cold_start", "train_prm")
"""Metric groups that count their own steps. Each has its own subfolder, which TensorBoard shows as a run."""


class Board(ExitStack):
    """A writer of one TensorBoard folder, as a context."""

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        """Open a new event file. TensorBoard hides events that older files hold at `purge_step` and later."""
        super().__init__()
        self._folder = folder
        self._writers: dict[str, SummaryWriter] = {}
        self._writer("", purge_step)

    def add_scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            group = name.partition("/")[0]
            self._writer(group if group in PHASES_BEFORE_RL else "").add_scalar(name, value, step)

    def flush(self) -> None:
        """Write all events to disk."""
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, group: str, purge_step: int | None = 0) -> "SummaryWriter":
        # A phase before RL is logged from its first step on, so that a repeated one replaces all of it.
        if group not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _hide_raised_again
            folder = str(self._folder / group)
            self._writers[group] = SummaryWriter(folder, purge_step=purge_step, flush_secs=10)
            self.callback(self._writers[group].close)
        return self._writers[group]


def _hide_raised_again(error: threading.ExceptHookArgs) -> None:
    """Print the exception of a thread, except one of the disk: TensorBoard raises it again in the thread that logs."""
    if not isinstance(error.exc_value, OSError):
        threading.__excepthook__(error)


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
            text = " ".join(without_secrets(str(error)).split())[:200]
            quoted = "" if exposed_key(text) else f": {text}"
            self._note(f"tracker '{name}' stopped and the run continues without it: {type(error).__name__}{quoted}")
