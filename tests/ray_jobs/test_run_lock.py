import errno
import fcntl
import os
import subprocess
import sys

import pytest

from configs.loading import load_run_config
from ray_jobs.run import folder as run_folder
from ray_jobs.run import folder as run_lock
from ray_jobs.run.folder import RunFolder, RunLock, RunLockError
from rollout.files import FileSystem


@pytest.fixture
def networked(monkeypatch, tmp_path):
    """The run's folder is as on a file server, and time passes only where somebody waits."""
    now = [0.0]
    monkeypatch.setattr(run_lock, "file_system_of", lambda path: FileSystem(kind="nfs4", mount=tmp_path))
    monkeypatch.setattr(run_lock.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_lock.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def make_config(tmp_path):
    return load_run_config(None, [f"output_dir={tmp_path}", "name=r"])


def make_folder(tmp_path):
    return RunFolder.create(make_config(tmp_path))


def test_second_process_is_told_who_works_on_the_run(tmp_path):
    lock = RunLock(tmp_path)
    with pytest.raises(RunLockError, match=rf"process {os.getpid()} on \S+ works on the run in '.*'; wait for it, or"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_lock_goes_with_the_process_that_held_it(tmp_path):
    script = f"from pathlib import Path; from ray_jobs.run.folder import RunLock; RunLock(Path({str(tmp_path)!r}));"
    subprocess.run([sys.executable, "-c", f"{script} import os; os._exit(1)"], check=False)
    RunLock(tmp_path).release()


def test_folder_stays_locked_while_it_goes_back_to_a_step(tmp_path, monkeypatch):
    refused = []

    rewrite = run_folder._rewrite

    def second_process(*written):
        rewrite(*written)
        with pytest.raises(RunLockError, match="works on the run"):
            RunLock(tmp_path / "r")
        refused.append(True)

    monkeypatch.setattr(run_folder, "_rewrite", second_process)
    with make_folder(tmp_path) as folder:
        folder.log_metrics(1, {"policy/loss": 0.5})
        assert folder.rewind(0) == []
        assert refused == [True, True]
        folder.log_metrics(1, {"policy/loss": 0.25})
        assert [row["policy/loss"] for row in folder.rewind(1)] == [0.25]
        with pytest.raises(RunLockError):
            RunLock(tmp_path / "r")
    RunLock(tmp_path / "r").release()


def test_run_that_another_process_works_on_keeps_its_settings(tmp_path):
    with make_folder(tmp_path) as folder:
        written = (folder.path / "config.json").read_bytes()
        with pytest.raises(RunLockError):
            RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r", "seed=9"]))
        assert (folder.path / "config.json").read_bytes() == written


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EIO])
def test_file_system_without_locks_is_one_clear_error(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(
        RunLockError, match=rf"cannot be locked: {os.strerror(number)}; its file system .* must support"
    ):
        make_folder(tmp_path)


def test_lock_of_a_machine_that_is_gone_is_waited_for(tmp_path, monkeypatch, networked):
    def flock(*_):
        if networked[0] < 90.0:
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".lock").write_text("process 7 on head-1")
    told = []
    RunLock(tmp_path, told.append).release()
    assert len(told) == 1
    assert told[0].startswith("process 7 on head-1 has the lock of")
    assert "waiting up to 120 s" in told[0]


def test_phases_that_are_finished_while_the_lock_is_waited_for_are_not_done_again(tmp_path, monkeypatch, networked):
    """Regression: they were read before, so that a resume which had waited began the phase again."""
    with make_folder(tmp_path) as folder:
        folder.begin_phase("reinforce")
    waited = []

    def flock(*_):
        if not waited:
            waited.append(True)
            phases = tmp_path / "r" / "phases.json"
            phases.write_text('{"reinforce": {"seconds": 5.0, "facts": {"num_steps": 3}}}')
            raise BlockingIOError

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunFolder.open(make_config(tmp_path), with_prm=False, tell=lambda _: None) as folder:
        assert folder.finished_phases["reinforce"]["facts"] == {"num_steps": 3}


def test_lock_of_a_machine_that_lives_is_not_waited_for_without_end(tmp_path, networked):
    lock = RunLock(tmp_path)
    with pytest.raises(
        RunLockError, match=r"works on the run in '.*'; wait for it, or stop it first \(120 s of waiting"
    ):
        RunLock(tmp_path, lambda _: None)
    assert 120.0 <= networked[0] < 125.0
    lock.release()


@pytest.mark.parametrize("option", ["nolock", "local_lock=all", "localflock"])
def test_folder_whose_lock_other_machines_do_not_see_is_told(tmp_path, monkeypatch, option):
    """Two machines could work in it at a time."""
    place = FileSystem(kind="nfs", mount=tmp_path, options=frozenset({"rw", "vers=3", option}))
    monkeypatch.setattr(run_lock, "file_system_of", lambda path: place)
    told = []
    RunLock(tmp_path, told.append).release()
    assert len(told) == 1
    assert f"is mounted with {option}: its lock is this machine's alone" in told[0]


def test_folder_with_locks_of_its_server_tells_nothing(tmp_path, networked):
    told = []
    RunLock(tmp_path, told.append).release()
    assert told == []
