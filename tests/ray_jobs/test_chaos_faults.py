"""What the faults of `agentflow chaos` do, with a process that only sleeps in the place of a run."""

import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from configs.loading import load_run_config
from ray_jobs.checks.chaos.faults import FAULTS, WAL_HEADER, Stage
from ray_jobs.checks.chaos.job import Job, descendants
from ray_jobs.checks.chaos.machines import Machines
from ray_jobs.checks.chaos.run import ChaosError, run_chaos
from ray_jobs.cli import main

SAYS_SO = "import time; print('reinforce ...', flush=True); time.sleep(60)"


def begin(tmp_path, code=SAYS_SO):
    """A job that rolls out by now."""
    folder = tmp_path / "run"
    folder.mkdir()
    job = Job(start=[sys.executable, "-c", code], folder=folder, log=tmp_path / "run.log")
    job.ensure_running()
    deadline = time.monotonic() + 30
    while not job.rolls_out and time.monotonic() < deadline:
        time.sleep(0.02)
    return job


@pytest.fixture
def stage(tmp_path):
    job = begin(tmp_path)
    yield Stage(job=job, rng=random.Random(0), max_workers=3)
    job.end()


def test_part_that_is_not_there_is_not_hit(stage):
    assert FAULTS["kill-learner"](stage) is None
    assert FAULTS["hang-prm"](stage) is None
    assert stage.job.runs


def test_job_that_does_not_end_when_it_is_asked_to_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("ray_jobs.checks.chaos.job.END_PATIENCE_S", 0.2)
    job = begin(tmp_path, f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SAYS_SO}")
    job.end()
    assert job.process.returncode == -signal.SIGKILL


def test_driver_is_killed(stage):
    assert FAULTS["kill-driver"](stage) == "killed driver"
    assert not stage.job.runs


def test_power_cut_leaves_the_beginning_of_the_ledgers_log(stage):
    log = stage.job.folder / "ledger.sqlite-wal"
    log.write_bytes(bytes(5000))
    said = FAULTS["power"](stage)
    assert not stage.job.runs
    assert WAL_HEADER <= log.stat().st_size <= 5000
    assert said == f"cut the power: {5000 - log.stat().st_size} bytes of the ledger's log are lost"


def test_power_cut_takes_away_nothing_that_a_part_on_another_machine_has_open(stage, monkeypatch):
    monkeypatch.setattr("ray_jobs.checks.chaos.job.PARTS_PATIENCE_S", 0.2)
    with subprocess.Popen(["bash", "-c", "exec -a ray::StoreActor sleep 60 & wait"]) as machine:
        stage.job.others = lambda: [machine.pid]
        while "store" not in stage.job.alive():
            time.sleep(0.02)
        (stage.job.folder / "ledger.sqlite-wal").write_bytes(bytes(5000))
        left = []
        monkeypatch.setattr("os.truncate", lambda *_: left.extend(descendants(machine.pid)))
        assert FAULTS["power"](stage).startswith("cut the power")
        machine.kill()
    assert left == []


def test_large_disk_is_never_filled(stage, monkeypatch):
    monkeypatch.setattr("ray_jobs.checks.chaos.faults.SMALL_DISK", 0)
    assert FAULTS["disk"](stage) is None
    assert not (stage.job.folder.parent / "ballast").exists()


def test_workers_file_asks_for_another_number(stage):
    assert FAULTS["workers"](stage).startswith("asked for ")
    assert 1 <= int((stage.job.folder / "workers").read_text()) <= 3


def test_second_resume_that_is_not_refused_is_a_complaint(stage, monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout="resumed", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert FAULTS["resume-twice"](stage) == "resumed the run a second time"
    assert stage.complaints == ["a second resume was not refused: resumed"]


def test_second_resume_that_is_refused_is_none(stage, monkeypatch):
    said = "agentflow: error: process 7 on host works on the run in 'run'"
    done = subprocess.CompletedProcess([], 2, stdout="", stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    FAULTS["resume-twice"](stage)
    assert stage.complaints == []


def test_fault_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    config = load_run_config(None, [f"output_dir={tmp_path}", "name=r"])
    with pytest.raises(ChaosError, match=r"there are the faults kill-driver, .*poison; got melt"):
        run_chaos(config, [], num_faults=1, seed=0, only=["kill-store", "melt"], two_machines=False)


def test_run_that_has_ended_is_not_called_sound_without_a_fault(tmp_path):
    config = load_run_config(None, [f"output_dir={tmp_path}", "name=r"])
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "summary.json").write_text("{}")
    with pytest.raises(ChaosError, match=r"/r' has ended, so that no fault can meet it; choose another name="):
        run_chaos(config, ["false"], num_faults=1, seed=0, only=[], two_machines=False)


def test_machine_that_went_down_by_itself_is_lost_as_any_other(stage, tmp_path, monkeypatch):
    stage.machines = Machines(tmp_path)
    monkeypatch.setattr("ray_jobs.checks.chaos.machines.RAY", "true")
    monkeypatch.setattr("ray_jobs.checks.chaos.faults.MACHINE_STAYS_AWAY_S", 0.0)
    stage.machines.add(2)
    while stage.machines.roots():
        time.sleep(0.01)
    assert FAULTS["machine"](stage) == "lost a machine, and added one"
    stage.machines.stop()


def test_job_on_two_machines_may_have_more_workers_than_this_one_has_places(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("ray_jobs.checks.chaos.run.run_chaos", lambda config, start, **how: asked.append(how) or 0)
    given = ["chaos", "chaos_cpu", "rollout.num_workers=2", f"output_dir={tmp_path}"]
    assert main(given) == 2
    assert main([*given, "--two-machines"]) == 0
    assert [how["two_machines"] for how in asked] == [True]


@pytest.fixture
def victim(stage, monkeypatch):
    """A ledger with one running group, whose state a test may set, and a worker that dies of nothing."""
    ledger = sqlite3.connect(stage.job.folder / "ledger.sqlite", isolation_level=None)
    ledger.execute("CREATE TABLE groups (ordinal INTEGER, state TEXT)")
    ledger.execute("INSERT INTO groups VALUES (7, 'running')")
    monkeypatch.setattr(Job, "alive", lambda job: {"rollout": [1]})
    monkeypatch.setattr("ray_jobs.checks.chaos.faults.LOOK_S", 0.01)
    deaths = []
    monkeypatch.setattr("ray_jobs.checks.chaos.faults.send", lambda *signal: deaths.append(signal))
    yield ledger, deaths
    ledger.close()


def test_poisoned_group_kills_until_it_has_failed(stage, victim, monkeypatch):
    ledger, deaths = victim

    def die(*_):
        deaths.append(1)
        if len(deaths) == 3:
            ledger.execute("UPDATE groups SET state = 'failed'")

    monkeypatch.setattr("ray_jobs.checks.chaos.faults.send", die)
    assert FAULTS["poison"](stage) == "poisoned g000007: 3 workers died of it"
    assert (stage.poisoned, stage.complaints) == ({"g000007"}, [])


def test_poisoned_group_that_never_fails_is_a_complaint(stage, victim, monkeypatch):
    monkeypatch.setattr("ray_jobs.checks.chaos.faults.POISON_S", 0.1)
    assert FAULTS["poison"](stage)
    (complaint,) = stage.complaints
    assert complaint.startswith("g000007 killed")
    assert complaint.endswith("and has not failed")
