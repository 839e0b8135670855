"""The folder of a run: configuration, provenance, metrics, trajectories, checkpoints, summary, and its lock."""

import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import msgspec

from configs.errors import UserError
from configs.run import RunConfig, TrackerName
from envs.sandbox import SandboxState
from ray_jobs.run.origin import provenance
from ray_jobs.run.trackers import PHASES_BEFORE_RL, TRACKERS, Board, Trackers
from rollout.codec import trajectory_line
from rollout.files import (
    TOKENIZER,
    cut_off,
    named,
    network_file_system,
    read_json,
    read_records,
    sync,
    sync_tree,
    whole_lines,
    write_whole,
)
from rollout.lifecycle import GroupRow
from rollout.types import Trajectory


def locked(folder: Path) -> TextIO:
    """Create a run folder if necessary, and lock it until the returned file is closed or this process ends.

    Raises UserError if another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with file:
            file.seek(0)
            holder = file.read().strip() or "another process"
        raise UserError(f"{holder} works on the run in '{folder}'; wait for it, or stop it first") from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


PHASES = "phases.json"
METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories.jsonl"
GROUPS = "groups.jsonl"
TENSORBOARD = "tb"


class _Place(msgspec.Struct):
    """The phase and train step of a logged line."""

    phase: str = "train"
    step: int | None = None


class RunPaths:
    """Where the files of a run lie."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.cold_start = path / "cold_start"
        self.collected = path / "collected"
        self.deepened = path / "deepened"
        self.labels = path / "labels.jsonl"
        self.receipts = path / "judge_receipts.jsonl"
        self.prm = path / "prm"
        self.quality = path / "prm_quality.json"


class RunFolder(RunPaths, AbstractContextManager["RunFolder"]):
    """The writer of a run folder, which is locked until `close`. Every file can be read on its own after a crash."""

    def __init__(
        self, path: Path, tell: Callable[[str], None] = print, *, trackers: Sequence[TrackerName] = ()
    ) -> None:
        """Create, lock and open the folder. `tell` prints messages. Raises UserError if it is locked."""
        # Actors use the paths in other working directories.
        super().__init__(path.absolute())
        self._started = time.monotonic()
        self._opened_s = 0.0
        """`_elapsed_s` when the folder was opened: the seconds of earlier processes up to their last metrics row."""
        self._lock = locked(self.path)
        phases = self.path / PHASES
        self._phases: dict[str, Any] = read_json(phases) if phases.exists() else {}
        self._trackers = Trackers(self.path, trackers, tell)
        self._open_files()

    @classmethod
    def open(
        cls,
        config: RunConfig,
        *,
        with_prm: bool = False,
        sandbox: SandboxState | None = None,
        tell: Callable[[str], None] = print,
    ) -> "RunFolder":
        """Create the folder with configuration and provenance, or continue the unfinished run in it."""
        path = config.run_path
        is_new = not (path / "config.json").exists()
        folder = cls(path, tell, trackers=config.trackers)
        if not is_new:
            tell(f"continuing the unfinished run in '{path}'")
            written = read_json(path / "config.json")  # with the settings that have changed from now on
            moved = {name: written[name] for name in ("name", "output_dir")}
            write_json(path / "config.json", config.model_dump(mode="json") | moved)
            folder.rewind(sys.maxsize)
            folder._opened_s = folder._elapsed_s
            return folder
        if kind := network_file_system(path):
            tell(f"the run folder is on {kind}: its lock may not reach other machines, so start no second run in it")
        walls = asdict(sandbox) if sandbox else None
        write_json(path / "provenance.json", provenance(seed=config.seed, with_prm=with_prm, sandbox=walls))
        write_json(path / "config.json", config.model_dump(mode="json"))
        return folder

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file and release the lock, also if a file fails. Raise the error of a failed `log_step`."""
        try:
            with named(self.path):
                self._files.close()
        finally:
            self._trackers.close()
            self._lock.close()

    def _open_files(self, *, purge_step: int | None = None) -> None:
        with ExitStack() as opened:
            self._metrics = opened.enter_context((self.path / METRICS).open("a", encoding="utf-8"))
            self._trajectories = opened.enter_context((self.path / TRAJECTORIES).open("ab"))
            self._groups = opened.enter_context((self.path / GROUPS).open("ab"))
            self._board = opened.enter_context(Board(self.path / TENSORBOARD, purge_step=purge_step))
            self._written: Future[None] | None = None
            # The thread ends first, because it writes to all the other files; then its error is raised.
            opened.callback(self.catch_up)
            self._thread = opened.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="log"))
            self._files = opened.pop_all()

    @property
    def finished_phases(self) -> dict[str, Any]:
        """Return the finished phases by name, in the order of their starts."""
        return {name: phase for name, phase in self._phases.items() if "facts" in phase}

    @property
    def _elapsed_s(self) -> float:
        """The seconds of the run so far. An earlier process counts up to its last row of metrics.jsonl."""
        return time.monotonic() - self._started

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a row to metrics.jsonl, and log TensorBoard scalars of the same names."""
        wall_s = round(self._elapsed_s, 3)
        with named(self.path / METRICS):
            self._metrics.write(json.dumps({"step": step, "wall_s": wall_s, **metrics}) + "\n")
            self._metrics.flush()
        with named(self.path / TENSORBOARD):
            self._board.add_scalars(step, metrics)

    def log_step(self, trajectories: Iterable[Trajectory], groups: Iterable[GroupRow] = ()) -> None:
        """Log the groups of a train step and their trajectories.

        Returns when the step before is written: a thread consumes `trajectories` and writes. What fails there is raised
        by the next call, by `catch_up`, or when the folder is closed.
        """
        self.catch_up()
        rows = list(groups)

        def write() -> None:
            with named(self.path / TRAJECTORIES):
                for trajectory in trajectories:
                    self._trajectories.write(trajectory_line(trajectory))
                self._trajectories.flush()
                self._groups.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
                self._groups.flush()

        self._written = self._thread.submit(write)

    def catch_up(self) -> None:
        """Wait until everything that was logged is written. Raise what failed, once."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def log_trajectories(self, trajectories: Iterable[Trajectory]) -> None:
        """Log trajectories after what was logged before."""
        self.catch_up()
        with named(self.path / TRAJECTORIES):
            self._trajectories.writelines(map(trajectory_line, trajectories))
            self._trajectories.flush()

    def sync(self) -> None:
        """Write everything that was logged to disk, so that it survives a power cut."""
        self.catch_up()
        with named(self.path):
            self._board.flush()
            for name in (METRICS, TRAJECTORIES, GROUPS):
                sync(self.path / name)
            sync_tree(self.path / TENSORBOARD)
            sync(self.path)

    def settle(self) -> None:
        """Declare everything that was logged as final, so that trackers receive it. Return at once."""
        self._trackers.settle(self.path / METRICS)

    def keep_tokenizer(self, model_path: Path) -> None:
        """Copy the model's tokenizer, so that the tokens of the trajectories can be read on other machines."""
        source, copy = model_path / TOKENIZER, self.path / TOKENIZER
        if source.exists() and not copy.exists():
            write_whole(copy, source.read_bytes())

    def begin_phase(self, name: str) -> float:
        """Mark a phase as started. Return the seconds that it took in earlier processes, up to their last rows."""
        started = self._phases.get(name, {"before_s": 0.0, "started_s": self._opened_s})
        before_s = started["before_s"] + max(0.0, self._opened_s - started["started_s"])
        self._phases[name] = {"before_s": round(before_s, 3), "started_s": round(self._elapsed_s, 3)}
        write_json(self.path / PHASES, self._phases)
        return before_s

    def finish_phase(self, name: str, seconds: float, facts: Mapping[str, object]) -> None:
        """Mark a phase as done and record its facts, after everything that it wrote is safe from a power cut."""
        self.catch_up()
        with named(self.path):
            self._board.flush()
            # Tracker libraries write and delete files in their folder at any time.
            sync_tree(self.path, besides=TRACKERS)
        self._phases[name] = {"seconds": round(seconds, 3), "facts": dict(facts)}
        write_json(self.path / PHASES, self._phases)
        self.settle()

    def reopen_phase(self, name: str) -> None:
        """Mark a finished phase as started, and remove the later phases. The next `rewind` drops what those logged."""
        phases = list(self._phases.items())[: list(self._phases).index(name) + 1]
        started = {"before_s": self._phases[name]["seconds"], "started_s": round(self._opened_s, 3)}
        self._phases = dict(phases) | {name: started}
        write_json(self.path / PHASES, self._phases)

    def rewind(self, step: int) -> list[dict[str, float]]:
        """Drop the rows of later train steps and of unfinished phases. Return the other metrics of train steps."""
        with named(self.path):
            self._files.close()
        metrics = self.path / METRICS
        kept = [
            row
            for row in read_records(metrics)
            if all(self._metric_stays(name, row["step"], step) for name in row if "/" in name)
        ]
        write_whole(metrics, (json.dumps(row).encode() + b"\n" for row in kept))
        for log in (self.path / TRAJECTORIES, self.path / GROUPS):
            # Lines are in the order in which they were logged, so what goes is the end of the file.
            cut_off(log, sum(map(len, self._lines_up_to(log, step))))
        self._trackers.num_sent = len(kept)
        elapsed_s = max([self._elapsed_s, *(row["wall_s"] for row in kept)])
        self._open_files(purge_step=step + 1 if step < sys.maxsize else None)
        self._started = time.monotonic() - elapsed_s
        return [row for row in kept if "policy/loss" in row]

    def _metric_stays(self, name: str, at: int, step: int) -> bool:
        """Return whether a metric that was logged at train step `at` stays when the run is rewound to `step`."""
        phase = name.partition("/")[0]
        return phase in self.finished_phases if phase in PHASES_BEFORE_RL else at <= step

    def _lines_up_to(self, log: Path, step: int) -> Iterator[bytes]:
        """Yield the lines before the first that goes when the run is rewound to `step`.

        Raises UserError for a damaged line.
        """
        for number, line in enumerate(whole_lines(log), start=1):
            try:
                place = msgspec.json.decode(line, type=_Place)
            except msgspec.DecodeError as error:
                raise UserError(f"'{log}', line {number}, was damaged after it was written: {error}") from error
            if not (place.phase in self.finished_phases if place.step is None else place.step <= step):
                return
            yield line

    def write_summary(self, summary: Mapping[str, object]) -> None:
        write_json(self.path / "summary.json", summary)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write a JSON file atomically: a reader sees the old file or the new one, also after a power cut."""
    write_whole(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def fingerprint_of(folder: Path) -> str:
    """Return the SHA-256 digest of a run's provenance, which includes its start time; empty without a run."""
    provenance_file = folder / "provenance.json"
    return hashlib.sha256(provenance_file.read_bytes()).hexdigest() if provenance_file.is_file() else ""
