import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from evaluating import model_in

from configs.errors import UserError
from configs.learner import ModelConfig
from configs.loading import load_run_config
from configs.run import RunConfig
from ray_jobs.cli import main
from ray_jobs.run.folder import RunFolder, locked
from ray_jobs.run.origin import check_same_run, check_trained_alike
from rollout.files import read_json, read_records
from tests.ray_jobs.view_world import make_group_row, make_trajectory


def config_in(tmp_path, *overrides):
    return load_run_config(None, [f"output_dir={tmp_path}", "name=r", *overrides])


def make_folder(tmp_path, *overrides):
    return RunFolder.open(config_in(tmp_path, *overrides))


def test_new_folder_has_configuration_and_provenance(tmp_path):
    with make_folder(tmp_path, "seed=7") as folder:
        assert folder.path == tmp_path / "r"
        config, origin = read_json(folder.path / "config.json"), read_json(folder.path / "provenance.json")
    assert (config["seed"], origin["seed"]) == (7, 7)
    assert origin["versions"].keys() >= {"ray", "numpy", "pydantic"}
    assert all(origin[name] for name in ("started", "python", "cores", "memory_gib"))


@pytest.fixture
def resumed(monkeypatch):
    """A function that resumes a run, and returns its configuration and working directory."""
    seen = []
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_start", lambda config, **_: None)
    monkeypatch.setattr(
        "ray_jobs.train.run_training", lambda config, ready, *, with_prm: seen.append((config, Path.cwd()))
    )

    def resume(path, *words):
        assert main(["resume", str(path), *words]) == 0
        return seen[-1]

    return resume


@pytest.fixture
def started_run(tmp_path, monkeypatch):
    """A run that was started in `home`, below its folder `runs`, as by default."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    with RunFolder.open(load_run_config(None, ["name=r"])) as folder:
        assert folder.path == home / "runs" / "r"
    return home / "runs" / "r"


def test_resume_uses_the_original_working_directory(started_run, tmp_path, monkeypatch, resumed):
    config, cwd = resumed("runs/r")
    assert (config.output_dir, cwd) == ("runs", started_run.parents[1])
    monkeypatch.chdir(tmp_path)
    config, cwd = resumed("home/runs/r")
    assert (config.run_path, cwd) == (started_run, started_run.parents[1])
    check_same_run(config, started_run)


MAY_CHANGE = """cluster.patience_s=600 cluster.dashboard=true card.learner=0.5 trackers=[] learner.keep_checkpoints=5
learner.checkpoint_every=1 learner.gradient_checkpointing=true learner.num_workers=2 learner.microbatch_tokens=512
rollout.num_workers=2 rollout.max_tries=9 rollout.engine.kv_cache_gib=0.5 reward.timeout_s=60 max_empty_batches=20
envs.sandbox=landlock prm.gradient_checkpointing=true evaluation.every_steps=2"""
STAYS = """seed=7 num_steps=13 batch_groups=5 max_staleness=1 learner.loss=grpo learner.adam_eps=1e-6 model.lora_rank=8
name=other rollout.temperature=0.9 rollout.episode_timeout_s=9 rollout.engine.max_model_len=2048 envs.mix={lookup=1.0}
output_dir=here rollout.engine.dtype=bfloat16 cold_start.num_demonstrations=0 evaluation.num_tasks=7"""


def test_resume_takes_the_settings_that_do_not_change_what_is_learned(started_run, resumed, capsys):
    config, _ = resumed(started_run, *MAY_CHANGE.split())
    assert (config.cluster.patience_s, config.learner.keep_checkpoints) == (600, 5)
    check_same_run(config, started_run)
    for setting in STAYS.split():
        assert main(["resume", str(started_run), setting]) == 2
        assert setting.partition("=")[0] in capsys.readouterr().err
    assert resumed(started_run)[0].cluster.patience_s == 60
    RunFolder.open(config, tell=lambda message: None).close()
    assert resumed(started_run)[0] == load_run_config(started_run) == config


@pytest.fixture
def passed(monkeypatch):
    """A function that advances the clock by seconds."""
    now = [5.0]
    monkeypatch.setattr("ray_jobs.run.folder.time", SimpleNamespace(monotonic=lambda: now[0]))

    def after(seconds):
        now[0] += seconds

    return after


def test_phase_time_includes_earlier_processes(tmp_path, passed):
    """Regression: repeated steps took no time in a resumed run, so its rates were too high."""

    def resume(step):
        passed(1000)
        folder = RunFolder.open(config_in(tmp_path), with_prm=False, tell=lambda message: None)
        # The start of a process belongs to no phase.
        passed(60)
        folder.rewind(step)
        return folder, folder.begin_phase("reinforce")

    folder = make_folder(tmp_path)
    passed(90)
    assert folder.begin_phase("reinforce") == 0
    for step, seconds, name in ((1, 10, "policy/loss"), (2, 10, "policy/loss"), (2, 50, "held_out/unscored")):
        passed(seconds)
        folder.log_metrics(step, {name: 0.5})
    folder.close()
    assert folder.finished_phases == {}

    again, seconds = resume(1)
    assert seconds == 70
    again.close()
    # A process that was killed before it logged anything, and has dropped the rows of steps after the checkpoint.
    again, seconds = resume(1)
    assert seconds == 70
    passed(10)
    again.log_metrics(2, {"policy/loss": 0.25})
    again.close()

    again, seconds = resume(0)
    assert seconds == 80
    again.finish_phase("reinforce", 85.0, {"num_steps": 2})
    again.close()
    assert again.finished_phases == read_json(tmp_path / "r" / "phases.json")
    assert again.finished_phases == {"reinforce": {"seconds": 85.0, "facts": {"num_steps": 2}}}


def test_reopened_phase_removes_later_phases(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.finish_phase("eval_before", 5.0, {})
        folder.begin_phase("reinforce")
        folder.finish_phase("reinforce", 85.0, {"num_steps": 2})
        folder.log_trajectories([make_trajectory("a", phase="eval_before")])
        folder.log_trajectories([make_trajectory("b", phase="eval_after")])
        folder.finish_phase("eval_after", 6.0, {})
    with RunFolder.open(config_in(tmp_path), with_prm=False, tell=lambda message: None) as again:
        again.reopen_phase("reinforce")
        again.rewind(1)
        assert list(again.finished_phases) == ["eval_before"]
        assert [row["id"] for row in read_records(again.path / "trajectories.jsonl")] == ["g000000/a"]
        assert again.begin_phase("reinforce") == pytest.approx(85.0, abs=0.001)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A function that creates a run with these settings in `home`, and returns the path of a checkpoint in it."""

    def train(*settings):
        monkeypatch.chdir(tmp_path / "home")
        RunFolder.open(load_run_config(None, ["name=r", *settings])).close()
        monkeypatch.chdir(tmp_path)
        return tmp_path / "home" / "runs" / "r" / "checkpoints" / "v000003"

    return train


def test_checkpoint_with_another_scale_or_base_is_rejected(trained, tmp_path):
    (tmp_path / "home").mkdir()
    base, other = model_in(tmp_path / "home"), model_in(tmp_path)
    checkpoint = trained("model.path=model", "model.lora_alpha=64")
    for model, folder, named in (
        (ModelConfig(path="home/model", lora_alpha=64), base, None),
        (ModelConfig(path="home/model"), base, r"model\.lora_alpha"),
        (ModelConfig(path="model", lora_alpha=64), other, r"model\.path"),
    ):
        with pytest.raises(UserError, match=named) if named else nullcontext():
            check_trained_alike(checkpoint, RunConfig(model=model), folder)


def train_row(step):
    return make_trajectory(step, step=step)


def slow_rows(step, gate):
    gate.wait(60)
    yield train_row(step)


def test_step_is_written_in_the_background(tmp_path):
    gate = threading.Event()
    with make_folder(tmp_path) as folder:
        folder.log_step(slow_rows(1, gate))
        folder.log_metrics(1, {"policy/loss": 0.5})
        assert (folder.path / "trajectories.jsonl").read_text() == ""
        gate.set()
        folder.catch_up()
        assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == [1]


@pytest.mark.parametrize(("step", "left"), [(1, [1]), (2, [1, 2])])
def test_rewind_waits_for_the_writer(tmp_path, step, left):
    gate = threading.Event()
    with make_folder(tmp_path) as folder:
        folder.log_step([train_row(1)])
        folder.log_step(slow_rows(2, gate))
        threading.Timer(0.1, gate.set).start()
        folder.rewind(step)
        assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == left
        folder.log_step([train_row(3)])
    assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == [*left, 3]


def test_rewind_shortens_the_logs_where_they_are(tmp_path):
    with make_folder(tmp_path) as folder:
        for step in (1, 2):
            folder.log_step([train_row(step)], [make_group_row(step, "trained", step)])
        folder.catch_up()
        logs = [folder.path / name for name in ("trajectories.jsonl", "groups.jsonl")]
        before = [(log.stat().st_ino, log.read_bytes().partition(b"\n")[0] + b"\n") for log in logs]
        folder.rewind(1)
        assert [(log.stat().st_ino, log.read_bytes()) for log in logs] == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "trajectories.jsonl", "groups.jsonl"])
def test_rewind_reports_a_damaged_line(tmp_path, name):
    with make_folder(tmp_path) as folder:
        for step in (1, 2):
            folder.log_step([train_row(step)], [make_group_row(step, "trained", step)])
            folder.log_metrics(step, {"policy/loss": 0.5})
        folder.catch_up()
        path = folder.path / name
        path.write_bytes(path.read_bytes().replace(b"{", b"", 1))
        with pytest.raises(UserError):
            folder.rewind(2)


def test_folder_is_locked_until_closed(tmp_path):
    held = locked(tmp_path)
    with pytest.raises(UserError):
        locked(tmp_path)
    held.close()
    locked(tmp_path).close()
