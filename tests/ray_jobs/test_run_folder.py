import json
import math
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.errors import UserError
from configs.learner import ModelConfig
from configs.loading import load_run_config
from configs.plugins import load_own
from configs.run import RunConfig
from learner.checkpoint import write_manifest
from ray_jobs.cli import main
from ray_jobs.run import provenance
from ray_jobs.run.begun import begun_config, check_trained_alike, checkpoint_at, run_of, started_in
from ray_jobs.run.folder import RunFolder, RunFolderError
from ray_jobs.run.preflight import check_same_run
from rollout.records import read_records
from tests.ray_jobs.view_world import make_group_row, make_task, make_trajectory

needs_full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")


def config_in(tmp_path, *overrides):
    return load_run_config(None, [f"output_dir={tmp_path}", "name=r", *overrides])


def make_folder(tmp_path, *overrides):
    return RunFolder.create(config_in(tmp_path, *overrides))


def read(path):
    return json.loads(path.read_text())


def test_folder_says_what_the_run_is_before_it_does_anything(tmp_path):
    with make_folder(tmp_path, "seed=7") as folder:
        assert folder.path == tmp_path / "r"
        config, origin = read(folder.path / "config.json"), read(folder.path / "provenance.json")
    assert (config["seed"], origin["seed"]) == (7, 7)
    assert config["learner"]["learning_rate"] > 0
    assert origin["versions"].keys() >= {"ray", "numpy", "pydantic"}
    assert origin["python"].startswith("3.")
    assert origin["cores"] >= 1
    assert origin["memory_gib"] > 0
    assert origin["started"]


@pytest.mark.parametrize("text", ["", '{"start": ', "[]"])
def test_damaged_phases_are_named_and_leave_the_folder_free(tmp_path, text):
    folder = make_folder(tmp_path)
    folder.close()
    (folder.path / "phases.json").write_text(text)
    with pytest.raises(UserError, match=r"/r/phases.json' is not a JSON object"):
        RunFolder(folder.path)
    (folder.path / "phases.json").unlink()
    RunFolder(folder.path).close()


@pytest.fixture
def resumed(monkeypatch):
    """What `agentflow resume RUN` would go on with: its configuration, and the folder it works in."""
    seen = []
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_start", lambda config, **_: None)
    monkeypatch.setattr(
        "ray_jobs.train.run_training", lambda config, ready, *, with_prm: seen.append((config, Path.cwd()))
    )

    def resume(path):
        assert main(["resume", str(path)]) == 0
        return seen[-1]

    return resume


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run that was started in `home`, below its folder `runs`, as by default."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    with RunFolder.create(load_run_config(None, ["name=r"])) as folder:
        assert folder.path == home / "runs" / "r"
    return home / "runs" / "r"


def test_run_is_resumed_from_anywhere_in_the_folder_it_was_started_in(begun, tmp_path, monkeypatch, resumed):
    config, cwd = resumed("runs/r")
    assert (config.output_dir, cwd) == ("runs", begun.parents[1])
    monkeypatch.chdir(tmp_path)
    config, cwd = resumed("home/runs/r")
    assert (config.run_path, cwd) == (begun, begun.parents[1])
    check_same_run(config, begun)


@pytest.fixture
def linked(begun, tmp_path):
    """The folder `runs` was moved to another disk, and a link is in its place."""
    (tmp_path / "disk").mkdir()
    begun.parent.rename(tmp_path / "disk" / "runs")
    begun.parent.symlink_to(tmp_path / "disk" / "runs")
    return begun


@pytest.mark.parametrize("named", ["home/runs/r", "disk/runs/r"])
def test_run_in_a_linked_folder_goes_on_where_it_was_started(linked, tmp_path, resumed, named):
    """Regression: its relative paths, as that of its data, were looked for beside the folder that the link leads to."""
    _, cwd = resumed(tmp_path / named)
    assert cwd == tmp_path / "home"


def test_run_in_a_linked_folder_is_known_from_everywhere(linked, tmp_path, monkeypatch, resumed):
    checkpoint = linked / "checkpoints" / "v000003"
    checkpoint.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert run_of(checkpoint) == run_of(Path("home/runs/r/checkpoints/v000003")) == linked
    assert started_in(run_of(checkpoint)) == tmp_path / "home"
    assert resumed(linked)[1] == tmp_path / "home"


def test_run_that_was_moved_is_resumed_where_it_is_now(begun, tmp_path, monkeypatch, resumed):
    moved = begun.rename(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    config, cwd = resumed("other")
    assert (config.run_path, cwd) == (moved, tmp_path)
    check_same_run(config, moved)


def test_run_whose_whole_home_was_moved_is_resumed_in_the_new_one(begun, tmp_path, monkeypatch, resumed):
    monkeypatch.chdir(tmp_path)
    begun.parents[1].rename(tmp_path / "new home")
    config, cwd = resumed(tmp_path / "new home" / "runs" / "r")
    assert (config.run_path, cwd) == (tmp_path / "new home" / "runs" / "r", tmp_path / "new home")


@pytest.fixture
def passed(monkeypatch):
    """Lets seconds pass."""
    now = [5.0]
    monkeypatch.setattr("ray_jobs.run.folder.time", SimpleNamespace(monotonic=lambda: now[0]))

    def after(seconds):
        now[0] += seconds

    return after


def test_a_phase_that_goes_on_took_all_that_it_took_in_processes_that_were_cut_off(tmp_path, passed):
    """Regression: evaluations on the way, checkpoints and steps that are made again took no time in a resumed run, and
    its rates, which count what was sampled in it, came out too high."""

    def go_on(step):
        passed(1000)
        folder = RunFolder.open(config_in(tmp_path), with_prm=False, tell=lambda told: None)
        # Its start belongs to no phase.
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

    again, seconds = go_on(1)
    assert seconds == 70
    again.close()
    # A process that was cut off before it logged anything, and has dropped the rows of steps that no checkpoint knows.
    again, seconds = go_on(1)
    assert seconds == 70
    passed(10)
    again.log_metrics(2, {"policy/loss": 0.25})
    again.close()

    again, seconds = go_on(0)
    assert seconds == 80
    again.finish_phase("reinforce", 85.0, {"num_steps": 2})
    again.close()
    assert again.finished_phases == read(tmp_path / "r" / "phases.json")
    assert again.finished_phases == {"reinforce": {"seconds": 85.0, "facts": {"num_steps": 2}}}


def test_a_phase_that_was_done_can_go_on_and_those_after_it_are_not_done(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.finish_phase("eval_before", 5.0, {})
        folder.begin_phase("reinforce")
        folder.finish_phase("reinforce", 85.0, {"num_steps": 2})
        folder.log_trajectories([make_trajectory("a", phase="eval_before")])
        folder.log_trajectories([make_trajectory("b", phase="eval_after")])
        folder.finish_phase("eval_after", 6.0, {})
    with RunFolder.open(config_in(tmp_path), with_prm=False, tell=lambda told: None) as again:
        again.reopen_phase("reinforce")
        again.rewind(1)
        assert list(again.finished_phases) == ["eval_before"]
        assert [row["id"] for row in read_records(again.path / "trajectories.jsonl")] == ["g000000/a"]
        assert again.begin_phase("reinforce") == pytest.approx(85.0, abs=0.001)


def test_parts_that_died_are_counted_over_all_processes_of_a_run(tmp_path):
    """Regression: the summary of a run that was resumed counted those since then."""
    with make_folder(tmp_path) as folder:
        assert folder.num_restarts() == 0
        folder.keep_num_restarts(2)
    with RunFolder.open(config_in(tmp_path), with_prm=False, tell=lambda told: None) as again:
        assert again.num_restarts() == 2
        again.keep_num_restarts(3)
        assert again.num_restarts() == 3


OWN_TASKS = """
def load():
    return [{"question": f"q{n}", "answer": "x"} for n in range(8)]
"""


@pytest.fixture
def own_tasks(tmp_path, monkeypatch):
    """A run that was started in `home`, of a recipe in its folder `recipes` that names a module beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "home" / "recipes").mkdir(parents=True)
    (tmp_path / "home" / "recipes" / "tasks_of_a_begun_run.py").write_text(OWN_TASKS)
    recipe = Path("recipes") / "mine.toml"
    datasets = "datasets = { mine = { source = 'tasks_of_a_begun_run:load' } }"
    (tmp_path / "home" / recipe).write_text(f"name = 'r'\n[envs]\nmix = {{ mine = 1.0 }}\n{datasets}\n")
    monkeypatch.chdir(tmp_path / "home")
    RunFolder.create(load_run_config(recipe)).close()
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not place.startswith(str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home" / "runs" / "r"
    sys.modules.pop("tasks_of_a_begun_run", None)


def test_code_of_a_run_that_was_started_elsewhere_is_found(own_tasks):
    config = begun_config(own_tasks)
    assert config.code_path == "recipes"
    assert len(load_own(config.envs.datasets["mine"].source, key="source")()) == 8


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Makes a run that was started in `home` with these settings, and gives a checkpoint of it."""
    (tmp_path / "home").mkdir()

    def train(*settings):
        monkeypatch.chdir(tmp_path / "home")
        RunFolder.create(load_run_config(None, ["name=r", *settings])).close()
        monkeypatch.chdir(tmp_path)
        return tmp_path / "home" / "runs" / "r" / "checkpoints" / "v000003"

    return train


def model_in(folder, weights=b"weights"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_checkpoint_is_refused_with_another_scale_than_its_run_trained_it_with(trained, tmp_path):
    base = model_in(tmp_path / "base")
    checkpoint = trained(f"model.path={base}", "model.lora_alpha=64")
    with pytest.raises(UserError) as caught:
        check_trained_alike(checkpoint, RunConfig(model=ModelConfig(path=str(base))), base)
    assert str(caught.value) == (
        f"the adapter in {checkpoint} was trained with model.lora_alpha = 64.0, and with 32.0 it would count 0.5 "
        "times; set model.lora_alpha=64.0, or give the recipe of the run that trained it"
    )
    check_trained_alike(checkpoint, RunConfig(model=ModelConfig(path=str(base), lora_alpha=64)), base)


def test_checkpoint_of_an_own_agent_is_not_asked_as_the_built_in_planner(trained, tmp_path):
    base = model_in(tmp_path / "base")
    own = ["agent.function=my_agent:solve", "cold_start.num_demonstrations=0", "reward.credit=outcome"]
    checkpoint = trained(f"model.path={base}", *own)
    with pytest.raises(UserError, match=r"was trained with agent.type = 'function', .*/r/config.json"):
        check_trained_alike(checkpoint, RunConfig(model=ModelConfig(path=str(base))), base)
    command = load_run_config(None, [f"model.path={base}", "agent.command=python agent.py", *own[1:]])
    check_trained_alike(checkpoint, command, base)


def test_checkpoint_is_refused_on_another_base_than_its_run_trained_it_on(trained, tmp_path):
    base, other = model_in(tmp_path / "home" / "base"), model_in(tmp_path / "other", b"weightt")
    checkpoint = trained("model.path=base")
    with pytest.raises(UserError) as caught:
        check_trained_alike(checkpoint, RunConfig(model=ModelConfig(path="other")), other)
    assert str(caught.value) == (
        f"the adapter in {checkpoint} was trained on model.path = '{base}', and model.path = 'other' is not known to "
        f"have the same weights; set model.path={base}, or, if they are the same, copy the checkpoint out of its run"
    )


def test_base_of_the_same_name_in_another_folder_is_not_taken_for_the_runs(trained, tmp_path):
    model_in(tmp_path / "home" / "base")
    other = model_in(tmp_path / "base", b"weightt")
    with pytest.raises(UserError, match="is not known to have the same weights"):
        check_trained_alike(trained("model.path=base"), RunConfig(model=ModelConfig(path="base")), other)


def test_base_is_the_same_under_whatever_path_it_lies(trained, tmp_path):
    base, copy = model_in(tmp_path / "home" / "base"), model_in(tmp_path / "copy")
    checkpoint = trained("model.path=base")
    check_trained_alike(checkpoint, RunConfig(model=ModelConfig(path=str(base))), base)
    check_trained_alike(checkpoint, RunConfig(model=ModelConfig(path="copy")), copy)
    checkpoint.parents[1].rename(tmp_path / "moved")
    with pytest.raises(UserError, match="copy the checkpoint out of its run"):
        check_trained_alike(
            tmp_path / "moved" / "checkpoints" / "v000003", RunConfig(model=ModelConfig(path="copy")), copy
        )


@pytest.mark.parametrize("name", ["demo", "some/model"])
def test_base_that_lies_in_no_folder_is_known_by_its_name(trained, tmp_path, name):
    checkpoint, other = trained(f"model.path={name}"), model_in(tmp_path / "other")
    check_trained_alike(checkpoint, RunConfig(model=ModelConfig(path=name)), other)
    with pytest.raises(UserError, match=f"was trained on model.path = '{name}', and model.path = 'other' is not"):
        check_trained_alike(checkpoint, RunConfig(model=ModelConfig(path="other")), other)


def test_newer_checkpoint_that_cannot_be_used_is_told(begun, capsys):
    """Regression: an older policy was evaluated and exported without a word."""
    for step in (2, 4):
        checkpoint = begun / "checkpoints" / f"v{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "adapter.safetensors").write_bytes(b"weights")
        write_manifest(checkpoint, policy_version=step, step=step)
    assert checkpoint_at(begun) == checkpoint
    assert capsys.readouterr().err == ""
    (checkpoint / "adapter.safetensors").write_bytes(b"rubbish")
    assert checkpoint_at(begun) == begun / "checkpoints" / "v000002"
    assert f"passed over a checkpoint: {checkpoint}/adapter.safetensors: sha256" in capsys.readouterr().err


def test_checkpoint_outside_of_a_run_is_taken_at_the_recipes_word(tmp_path):
    check_trained_alike(tmp_path / "v000003", RunConfig(model=ModelConfig(lora_alpha=1)), tmp_path)


def test_command_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["agentflow", "train", "envs.mix={lookup = 1.0}"])
    with make_folder(tmp_path) as folder:
        assert read(folder.path / "provenance.json")["command"] == "agentflow train 'envs.mix={lookup = 1.0}'"


def test_without_git_the_commit_is_unknown_and_not_called_clean(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_git", lambda *arguments: None)
    with make_folder(tmp_path) as folder:
        origin = read(folder.path / "provenance.json")
    assert origin["git_commit"] is None
    assert origin["git_dirty"] is None


def test_metrics_can_be_read_during_the_run(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_metrics(1, {"policy/loss": 0.5})
        folder.log_metrics(2, {"policy/loss": 0.25, "rollout/solve_rate": 0.75})
        rows = [json.loads(line) for line in (folder.path / "metrics.jsonl").open()]
    assert [(row["step"], row["policy/loss"]) for row in rows] == [(1, 0.5), (2, 0.25)]
    assert 0 <= rows[0]["wall_s"] <= rows[1]["wall_s"]


def test_a_loss_that_became_nan_is_kept_as_what_it_is(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_metrics(1, {"policy/loss": math.nan})
        assert math.isnan(read(folder.path / "metrics.jsonl")["policy/loss"])


def test_summary_replaces_the_one_before_and_leaves_no_partial_file(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.write_summary({"num_steps": 1})
        folder.write_summary({"num_steps": 2})
        assert read(folder.path / "summary.json") == {"num_steps": 2}
        assert list(folder.path.glob("*.partial")) == []


def test_summary_that_cannot_be_written_leaves_the_old_one(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.write_summary({"num_steps": 1})
        with pytest.raises(TypeError):
            folder.write_summary({"num_steps": object()})
        assert read(folder.path / "summary.json") == {"num_steps": 1}


def test_text_in_any_script_survives(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_trajectories([make_trajectory(0, task=make_task(0, "Wie viele Äpfel? 苹果 \n2"))])
        (line,) = (folder.path / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["task"]["question"] == "Wie viele Äpfel? 苹果 \n2"


def test_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"cannot write '.*file/r': Not a directory; .*output_dir"):
        make_folder(tmp_path / "file")


@needs_full_device
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("metrics.jsonl", lambda folder: folder.log_metrics(1, {"policy/loss": 0.5})),
        ("trajectories.jsonl", lambda folder: folder.log_trajectories([make_trajectory(0)])),
        ("summary.partial", lambda folder: folder.write_summary({"num_steps": 1})),
    ],
)
def test_full_disk_is_one_clear_error(tmp_path, name, write):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / name).symlink_to("/dev/full")
    folder = make_folder(tmp_path)
    with pytest.raises(RunFolderError, match="No space left on device; free some space"):
        write(folder)


def train_row(step):
    return make_trajectory(step, step=step)


def slow_rows(step, gate):
    gate.wait(60)
    yield train_row(step)


def test_trajectories_of_a_step_are_written_while_the_run_goes_on(tmp_path):
    gate = threading.Event()
    with make_folder(tmp_path) as folder:
        folder.log_step(1, slow_rows(1, gate), version_ages={})
        folder.log_metrics(1, {"policy/loss": 0.5})
        assert (folder.path / "trajectories.jsonl").read_text() == ""
        gate.set()
        folder.catch_up()
        assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == [1]


@pytest.mark.parametrize(("step", "left"), [(1, [1]), (2, [1, 2])])
def test_rewinding_waits_for_what_is_being_written(tmp_path, step, left):
    gate = threading.Event()
    with make_folder(tmp_path) as folder:
        folder.log_step(1, [train_row(1)], version_ages={})
        folder.log_step(2, slow_rows(2, gate), version_ages={})
        threading.Timer(0.1, gate.set).start()
        folder.rewind(step)
        assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == left
        folder.log_step(3, [train_row(3)], version_ages={})
    assert [row["step"] for row in read_records(folder.path / "trajectories.jsonl")] == [*left, 3]


@pytest.mark.parametrize("name", ["metrics.jsonl", "trajectories.jsonl", "groups.jsonl"])
def test_rewinding_over_a_damaged_line_names_it(tmp_path, name):
    with make_folder(tmp_path) as folder:
        for step in (1, 2):
            folder.log_step(step, [train_row(step)], [make_group_row(step, "trained", step)], version_ages={})
            folder.log_metrics(step, {"policy/loss": 0.5})
        folder.catch_up()
        path = folder.path / name
        path.write_bytes(path.read_bytes().replace(b"{", b"", 1))
        with pytest.raises(UserError, match=f"{name}', line 1"):
            folder.rewind(2)


@needs_full_device
def test_disk_that_is_full_while_a_step_is_written_is_told_to_the_next(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "trajectories.jsonl").symlink_to("/dev/full")
    folder = make_folder(tmp_path)
    folder.log_step(1, [train_row(1)], version_ages={})
    with pytest.raises(RunFolderError, match="No space left on device; free some space"):
        folder.catch_up()


@needs_full_device
def test_files_behind_a_full_one_are_closed_as_well(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "metrics.jsonl").symlink_to("/dev/full")
    folder = make_folder(tmp_path)
    with pytest.raises(RunFolderError), folder:
        folder.log_metrics(1, {"policy/loss": 0.5})
    with pytest.raises(ValueError, match="closed file"):
        folder.log_trajectories([make_trajectory(0)])
