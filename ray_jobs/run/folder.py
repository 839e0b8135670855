"""The folder of a run: configuration, provenance, metrics, trajectories, checkpoints, summary, and its lock."""

import errno
import fcntl
import hashlib
import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from configs.errors import UserError
from configs.run import RunConfig, TrackerName
from envs.sandbox import SandboxState
from ray_jobs.run.begun import RunFolderError
from ray_jobs.run.provenance import provenance
from ray_jobs.run.trackers import PHASES_BEFORE_RL, TRACKERS, Board, StepDistributions, StepTexts, Trackers
from rollout.records import TOKENIZER, RecordLine, line_of, read_heads, read_json, read_records
from rollout.store.disk import FileSystem, file_system_of, sync, sync_tree, write_whole

LEASE_S = 120.0
"""A file server holds the locks of a machine that went down for so long at most: NFSv4 grants leases of 90 s."""
RETRY_S = 2.0


class RunLockError(UserError):
    """The run's folder cannot be locked; the message says who holds it, or why."""


class RunLock:
    """Held from the moment it is made until `release`. The system lets go of it when the process ends, however it
    ends."""

    def __init__(self, folder: Path, tell: Callable[[str], None] = print) -> None:
        """Raises RunLockError when another process has it. On a network file system that may be a machine which is
        gone: there the lock is waited for as long as a file server keeps it, and `tell` hears of it. Raises OSError
        when the folder is not writable."""
        self._file = (folder / ".lock").open("a+")
        try:
            _take(self._file, folder, tell)
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def release(self) -> None:
        self._file.close()


@contextmanager
def locked(folder: Path, tell: Callable[[str], None] = print) -> Iterator[None]:
    """Nobody else works on this run meanwhile; its folder is made where there is none. Raises what `RunLock` raises."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder, tell)
    try:
        yield
    finally:
        lock.release()


def _take(file: TextIO, folder: Path, tell: Callable[[str], None]) -> None:
    place = file_system_of(folder)
    patience_s = LEASE_S if place.networked else 0.0
    deadline, told = time.monotonic() + patience_s, False
    while not _locked(file, folder, place):
        file.seek(0)
        holder = file.read().strip() or "another process"
        if time.monotonic() >= deadline:
            waited = f" ({patience_s:.0f} s of waiting were not enough)" if patience_s else ""
            raise RunLockError(f"{holder} works on the run in '{folder}'; wait for it, or stop it first{waited}")
        if not told:
            told = True
            tell(
                f"{holder} has the lock of '{folder}'; waiting up to {patience_s:.0f} s, because the file server "
                f"({place.kind}) keeps the locks of a machine that is gone for so long"
            )
        time.sleep(RETRY_S)
    if option := place.locks_here_only:
        tell(
            f"'{folder}' is mounted with {option}: its lock is this machine's alone, and a run that another machine "
            "starts in it would spoil this one; mount it with locks"
        )


def _locked(file: TextIO, folder: Path, place: FileSystem) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some file servers say that a lock is held in this way.
        if error.errno == errno.EACCES:
            return False
        raise RunLockError(
            f"'{folder}' cannot be locked: {error.strerror}; its file system ({place.kind or 'unknown'}) must support "
            "flock: mount it with locks, or set output_dir=... to another one"
        ) from error
    return True


Result = TypeVar("Result")


class Backlog:
    """At most `most` pieces are open; whoever adds another one then waits. What a piece raises is raised to whoever
    adds the next one, or waits for all, and once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: deque[Future[object]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="backlog")

    def add(self, work: Callable[[], Result]) -> None:
        """Raises what earlier pieces raised."""
        while self._open and (self._open[0].done() or len(self._open) >= self._most):
            self._open.popleft().result()
        self._open.append(self._thread.submit(work))

    def finish(self) -> None:
        """Wait until all is done. Raises what a piece raised, the first one first, once all have ended."""
        wait(self._open)
        while self._open:
            self._open.popleft().result()

    def close(self) -> None:
        """As `finish`; nothing can be added any more."""
        self._thread.shutdown()
        self.finish()


PHASES = "phases.json"
METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories.jsonl"
TENSORBOARD = "tb"


STEPS_BEHIND = 2
"""The trajectories of so many train steps may wait to be written."""


class RunPaths:
    """Where the files of a run lie."""

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
        self.restarts = path / "restarts"


class RunFolder(RunPaths, AbstractContextManager["RunFolder"]):
    """Writes below one folder, which is locked from the beginning to `close`; every file is useful on its own after a
    crash. Its paths are absolute: actors are given them, and may have been started in another folder."""

    def __init__(
        self, path: Path, tell: Callable[[str], None] = print, *, trackers: Sequence[TrackerName] = ()
    ) -> None:
        """Raises RunLockError where another process works on the run; `tell` hears of a lock that is waited for, and of
        a tracker that fails."""
        super().__init__(path.absolute())
        path = self.path
        self._started = time.monotonic()
        self._opened_s = 0.0
        """`_elapsed_s` when the folder was opened: what processes that were cut off had logged."""
        with _writing(path):
            self._lock = RunLock(path, tell)
        self._files = ExitStack()
        try:
            # Now: whoever had the lock may have finished some while it was waited for.
            phases = path / PHASES
            self._phases: dict[str, Any] = read_json(phases) if phases.exists() else {}
            self._trackers = Trackers(path, trackers, tell)
            self._open_files()
        except BaseException:
            self._lock.release()
            raise

    @classmethod
    def create(
        cls,
        config: RunConfig,
        *,
        with_prm: bool = False,
        sandbox: SandboxState | None = None,
        tell: Callable[[str], None] = print,
    ) -> "RunFolder":
        """Make the folder and write what the run is before it does anything."""
        path = config.run_path
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path, tell, trackers=config.trackers)
        walls = asdict(sandbox) if sandbox else None
        try:
            facts = {"with_prm": with_prm, "sandbox": walls, "file_system": file_system_of(path).kind}
            write_json(path / "provenance.json", provenance(seed=config.seed, **facts))
            write_json(path / "config.json", config.model_dump(mode="json"))
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def open(
        cls,
        config: RunConfig,
        *,
        with_prm: bool,
        sandbox: SandboxState | None = None,
        tell: Callable[[str], None] = print,
    ) -> "RunFolder":
        """A new folder, or the one of an unfinished run, which `tell` hears of."""
        path = config.run_path
        if not (path / "config.json").exists():
            return cls.create(config, with_prm=with_prm, sandbox=sandbox, tell=tell)
        folder = cls(path, tell, trackers=config.trackers)
        tell(f"goes on with the unfinished run in '{path}'")
        folder.rewind(sys.maxsize)
        folder._opened_s = folder._elapsed_s
        return folder

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file, even when one of them cannot be, and let go of the folder. Raises what `log_step` could not
        write."""
        try:
            self._close_files()
        finally:
            self._trackers.close()
            self._lock.release()

    def _open_files(self, *, purge_step: int | None = None) -> None:
        with _writing(self.path), ExitStack() as opened:
            self._metrics = opened.enter_context((self.path / METRICS).open("a", encoding="utf-8"))
            self._trajectories = opened.enter_context((self.path / TRAJECTORIES).open("ab"))
            self._board = Board(self.path / TENSORBOARD, purge_step=purge_step)
            opened.callback(self._board.close)
            self._backlog = Backlog(STEPS_BEHIND)
            # Last in, and so first out: it writes to all the others.
            opened.callback(self._backlog.close)
            self._files = opened.pop_all()

    def _close_files(self) -> None:
        with _writing(self.path):
            self._files.close()

    @property
    def fingerprint(self) -> str:
        """Tells this folder from others of the same name."""
        return fingerprint_of(self.path)

    @property
    def finished_phases(self) -> dict[str, Any]:
        """By name, in the order in which they began."""
        return {name: phase for name, phase in self._phases.items() if "facts" in phase}

    @property
    def _elapsed_s(self) -> float:
        """Seconds of the run so far. Of a process that was cut off they end with the last row of metrics.jsonl."""
        return time.monotonic() - self._started

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row in metrics.jsonl, and the same names as TensorBoard scalars."""
        wall_s = round(self._elapsed_s, 3)
        with _writing(self.path / METRICS):
            self._metrics.write(json.dumps({"step": step, "wall_s": wall_s, **metrics}) + "\n")
            self._metrics.flush()
        with _writing(self.path / TENSORBOARD):
            self._board.add_scalars(step, metrics)

    def log_step(
        self, step: int, lines: Iterable[RecordLine], *, version_ages: Mapping[int, int], num_trained: int = 0
    ) -> None:
        """The records of a train step, and what TensorBoard shows of them. `version_ages` are its batch's; for
        `num_trained` see `StepDistributions`. Returns at once: the records are made and written in a thread. What fails
        there is raised by the next call, by `catch_up`, or when the folder is closed."""
        self._backlog.add(partial(self._log_step, step, lines, StepDistributions(version_ages, num_trained)))

    def catch_up(self) -> None:
        """Returns when everything that was logged is written."""
        self._backlog.finish()

    def _log_step(self, step: int, lines: Iterable[RecordLine], distributions: StepDistributions) -> None:
        texts = StepTexts()
        with _writing(self.path / TRAJECTORIES):
            for line in lines:
                self._trajectories.write(line.line())
                for looking in (distributions, texts):
                    if looking.wants(line.head):
                        looking.add(line.record())
            self._trajectories.flush()
        with _writing(self.path / TENSORBOARD):
            self._board.add_histograms(step, distributions.histograms())
            self._board.add_texts(step, texts.texts())

    def log_trajectories(self, records: Iterable[Mapping[str, object]]) -> None:
        """After what was logged before."""
        self.catch_up()
        with _writing(self.path / TRAJECTORIES):
            for record in records:
                self._trajectories.write(line_of(record))
            self._trajectories.flush()

    def sync(self) -> None:
        """What was logged so far is written, and survives a power cut."""
        self.catch_up()
        with _writing(self.path):
            self._board.flush()
            sync(self.path / METRICS)
            sync(self.path / TRAJECTORIES)
            sync_tree(self.path / TENSORBOARD)
            sync(self.path)

    def settle(self) -> None:
        """What was logged so far is never taken back, so that trackers may have it. Returns at once."""
        self._trackers.settle(self.path / METRICS)

    def keep_tokenizer(self, model_path: Path) -> None:
        """A copy of the model's tokenizer, so that the tokens of the trajectories can be read wherever they are."""
        source, own = model_path / TOKENIZER, self.path / TOKENIZER
        if source.exists() and not own.exists():
            with _writing(own):
                write_whole(own, source.read_bytes())

    def begin_phase(self, name: str) -> float:
        """Mark a phase that another process can go on with as begun. Returns the seconds that it took already in
        processes that were cut off, of each up to the last row that it logged: with what is lost and made again, and
        without the start of a process."""
        begun = self._phases.get(name, {"before_s": 0.0, "begun_s": self._opened_s})
        before_s = begun["before_s"] + max(0.0, self._opened_s - begun["begun_s"])
        self._phases[name] = {"before_s": round(before_s, 3), "begun_s": round(self._elapsed_s, 3)}
        write_json(self.path / PHASES, self._phases)
        return before_s

    def finish_phase(self, name: str, seconds: float, facts: Mapping[str, object]) -> None:
        """Mark a phase as done; what it brought stands with it, and all that it wrote survives a power cut before."""
        self.catch_up()
        with _writing(self.path):
            self._board.flush()
            # Libraries of others write and delete there at any time.
            sync_tree(self.path, besides=TRACKERS)
        self._phases[name] = {"seconds": round(seconds, 3), "facts": dict(facts)}
        write_json(self.path / PHASES, self._phases)
        self.settle()

    def reopen_phase(self, name: str) -> None:
        """A phase that was done goes on, and those that came after it are not done any more. What they wrote leaves
        with the next `rewind`."""
        later = list(self._phases)[list(self._phases).index(name) + 1 :]
        phases = {one: phase for one, phase in self._phases.items() if one not in later}
        self._phases = phases | {name: {"before_s": phases[name]["seconds"], "begun_s": round(self._opened_s, 3)}}
        write_json(self.path / PHASES, self._phases)

    def rewind(self, step: int) -> list[dict[str, float]]:
        """Drop what was logged of train steps after `step`, and of other phases that were cut off: it will be logged
        again, and must not stand there twice. The folder stays locked. Returns the metrics that stay of the train
        steps."""
        self._close_files()
        metrics, trajectories = self.path / METRICS, self.path / TRAJECTORIES
        kept = [row for row in read_records(metrics) if self._metrics_stay(row, step)]
        with _writing(self.path):
            _rewrite(metrics, (json.dumps(row).encode() + b"\n" for row in kept))
            _rewrite(trajectories, (line for line, head in read_heads(trajectories) if self._stays(head, step)))
        self._trackers.num_sent = len(kept)
        elapsed_s = max([self._elapsed_s, *(row["wall_s"] for row in kept)])
        self._open_files(purge_step=step + 1 if step < sys.maxsize else None)
        self._started = time.monotonic() - elapsed_s
        return [row for row in kept if _is_train_step(row)]

    def _metrics_stay(self, row: Mapping[str, Any], step: int) -> bool:
        return all(self._metric_stays(name, row["step"], step) for name in row if "/" in name)

    def _metric_stays(self, name: str, at: int, step: int) -> bool:
        """Whether what was logged under a name at a step stays when the run goes back to `step`."""
        phase = name.partition("/")[0]
        return phase in self.finished_phases if phase in PHASES_BEFORE_RL else at <= step

    def _stays(self, row: Mapping[str, Any], step: int) -> bool:
        return row["phase"] in self.finished_phases if row["step"] is None else row["step"] <= step

    def num_restarts(self) -> int:
        """Parts of the run that died and were replaced so far, in all its processes."""
        text = self.restarts.read_text(encoding="ascii") if self.restarts.exists() else ""
        return int(text) if text.isdigit() else 0

    def keep_num_restarts(self, num: int) -> None:
        """A disk that is full costs the number, and not the run."""
        with suppress(OSError):
            write_whole(self.restarts, str(num).encode())

    def write_summary(self, summary: Mapping[str, object]) -> None:
        write_json(self.path / "summary.json", summary)


def _is_train_step(row: Mapping[str, object]) -> bool:
    return "policy/loss" in row


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


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Atomic: a reader sees the old file or the new one, also after a power cut."""
    with _writing(path):
        write_whole(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def fingerprint_of(folder: Path) -> str:
    """Of what a run wrote down at its beginning, with the time to the second; empty where there is nothing."""
    written = folder / "provenance.json"
    return hashlib.sha256(written.read_bytes()).hexdigest() if written.is_file() else ""


def _rewrite(path: Path, lines: Iterable[bytes]) -> None:
    """Atomic: the lines take the place of the file's when all are on disk."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.writelines(lines)
    sync(partial)
    partial.rename(path)
    sync(path.parent)
