"""Experiment trackers beside TensorBoard: each is told the rows of metrics.jsonl, each row once.

A row is told when it is settled: no resumption takes it back. It is marked before it is told, so that a kill may cost a
tracker a row and never brings one twice. A tracker works in a thread of its own; whatever it raises, or however long it
takes, the run goes on without it.
"""

import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from configs.api_keys import exposed_key, written_secret
from configs.errors import UserError
from configs.run import TrackerName
from rollout.records import read_records

PROJECT = "agentflow"
TRACKERS = "trackers"
"""Their folder in that of the run."""
PATIENCE_S = 60.0
"""How long the end of a run waits for a tracker."""


class TrackerError(UserError):
    """A tracker that a recipe names cannot be used here."""


class Tracker(Protocol):
    """What a library does with a run's metrics. Any method may raise anything."""

    def add(self, index: int, step: int, metrics: Mapping[str, float]) -> None:
        """One row of metrics.jsonl; `index` is its place there, from 0, and `step` the train step."""

    def close(self) -> None:
        """Everything is written when this returns."""


class WandbTracker:
    """Weights & Biases, offline unless WANDB_MODE says otherwise. A resumed run has the id of before. Neither command
    line nor settings, environment or code are sent."""

    def __init__(self, folder: Path, name: str, run_id: str) -> None:
        import wandb

        quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        unseen = {"x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False}
        mode = os.environ.get("WANDB_MODE", "offline")
        settings = wandb.Settings(mode=mode, **quiet, **unseen)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=PROJECT, name=name, id=run_id, dir=str(folder), resume="allow", settings=settings
        )
        self._run.define_metric("*", step_metric="step")

    def add(self, index: int, step: int, metrics: Mapping[str, float]) -> None:
        # Its own step only ever rises; train steps begin again with each phase.
        self._run.log({"step": step, **metrics}, step=index)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow at MLFLOW_TRACKING_URI, or a file store in the run's folder. A resumed run goes on in that of before."""

    def __init__(self, folder: Path, name: str, run_id: str) -> None:
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            where = (folder / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=where)
        found = self._client.get_experiment_by_name(PROJECT)
        experiment = found.experiment_id if found else self._client.create_experiment(PROJECT)
        known = self._client.search_runs([experiment], f"tags.agentflow = '{run_id}'")
        run = known[0] if known else self._client.create_run(experiment, run_name=name, tags={"agentflow": run_id})
        self._id = run.info.run_id

    def add(self, index: int, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioTracker:
    """Trackio, in its local database, in the run's folder unless TRACKIO_DIR names another one."""

    def __init__(self, folder: Path, name: str, run_id: str) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=f"{name}-{run_id[-6:]}",
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def add(self, index: int, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


OPENERS: dict[TrackerName, Callable[[Path, str, str], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def check_trackers(names: Sequence[TrackerName]) -> None:
    """Whether their libraries are installed. Raises TrackerError."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise TrackerError(
                f"trackers: '{name}' is not installed; pip install 'agentflow-ray[{name}]', or take it out of trackers"
            )


class Trackers:
    """All trackers of a run. Nothing is opened before the first row is settled."""

    def __init__(self, folder: Path, names: Sequence[TrackerName], tell: Callable[[str], None]) -> None:
        """`folder` is the run's; `tell` hears, in the caller's thread, of a tracker that failed."""
        self._told = [_Told(folder, name) for name in names]
        self._tell = tell

    def settle(self, rows: Path, run_id: str) -> None:
        """All rows that `rows` holds now are settled; `run_id` tells the run from others. Returns at once."""
        if self._told:
            settled = list(read_records(rows))
            for one in self._told:
                one.rows(settled, run_id)
        self._report()

    def close(self) -> None:
        """Wait for what is on its way, up to `PATIENCE_S` for each."""
        for one in self._told:
            one.finish()
        self._report()

    def _report(self) -> None:
        for one in self._told:
            if one.fault and not one.reported:
                one.reported = True
                self._tell(f"tracker '{one.name}' stopped, the run goes on without it: {one.fault}")


class _Told:
    """One tracker, its thread, and how many rows it was told."""

    def __init__(self, folder: Path, name: TrackerName) -> None:
        self.name = name
        self.fault: str | None = None
        self.reported = False
        self._run_name = folder.name
        self._folder = folder / TRACKERS / name
        self._mark = self._folder / "rows"
        self._given: queue.Queue[tuple[list[dict[str, Any]], str] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def rows(self, settled: list[dict[str, Any]], run_id: str) -> None:
        if self.fault:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
            self._thread.start()
        self._given.put((settled, run_id))

    def finish(self) -> None:
        if self._thread is None:
            return
        self._given.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self.fault = self.fault or f"it did not end within {PATIENCE_S:.0f} s"

    def _work(self) -> None:
        try:
            self._forward()
        # A library of somebody else may fail in any way, and some end the process.
        except (Exception, SystemExit) as error:
            said = " ".join(str(error).split())[:200]
            secret = written_secret(said) or exposed_key(said)
            self.fault = type(error).__name__ if secret else f"{type(error).__name__}: {said}"

    def _forward(self) -> None:
        tracker: Tracker | None = None
        while (given := self._given.get()) is not None:
            rows, run_id = given
            told = self._marked()
            for index, row in enumerate(rows[told:], told):
                self._folder.mkdir(parents=True, exist_ok=True)
                if tracker is None:
                    tracker = OPENERS[self.name](self._folder, self._first_name(), run_id)
                self._mark_told(index + 1)
                tracker.add(index, row["step"], {name: value for name, value in row.items() if "/" in name})
        if tracker is not None:
            tracker.close()

    def _first_name(self) -> str:
        """A folder may get another name; Trackio knows the run by the one that it had first."""
        kept = self._folder / "name"
        if not kept.exists():
            kept.write_text(self._run_name, encoding="utf-8")
        return kept.read_text(encoding="utf-8")

    def _mark_told(self, num: int) -> None:
        """So many rows from now on. A kill leaves the number of before, or this one. Nothing below this folder is
        synced, as `write_whole` would: a tracker may take its files away again."""
        partial = self._mark.with_suffix(".partial")
        partial.write_text(str(num), encoding="ascii")
        partial.replace(self._mark)

    def _marked(self) -> int:
        text = self._mark.read_text(encoding="ascii") if self._mark.exists() else ""
        return int(text) if text.isdigit() else 0
