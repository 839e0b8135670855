import pytest

from configs.loading import load_run_config
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.provenance import shown, with_absolute_paths
from ray_jobs.run.run import _sees

RELATIVE = ("envs.data_path=mine.jsonl", "envs.recording=said.jsonl", "reward.credit.prm_path=runs/p/prm")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_actors_are_given_paths_that_mean_the_same_everywhere(here):
    config = with_absolute_paths(load_run_config(None, ["name=r", *RELATIVE]))
    paths = (config.output_dir, config.envs.data_path, config.envs.recording, config.reward.prm_path)
    assert paths == tuple(f"{here}/{name}" for name in ("runs", "mine.jsonl", "said.jsonl", "runs/p/prm"))
    assert with_absolute_paths(config) == config


def test_recorded_conversations_blocked_questions_and_a_memory_are_found_from_everywhere(here):
    """Regression: in a cluster that was started in another folder the run ended when a worker looked for them."""
    own = ("agent.function=agents:mine", "label.type=monte_carlo", "cold_start.path=chats.jsonl")
    recorded = with_absolute_paths(load_run_config(None, ["name=r", *own, "envs.web.blocked_questions=held.txt"]))
    assert recorded.cold_start.path == f"{here}/chats.jsonl"
    assert recorded.envs.web.blocked_questions == f"{here}/held.txt"
    remembered = with_absolute_paths(
        load_run_config(None, ["name=r", "agent.memory.type=folder", "agent.memory.path=hints"])
    )
    assert remembered.planner.memory.path == f"{here}/hints"
    assert with_absolute_paths(recorded) == recorded


def test_data_of_a_submitted_job_travels_with_its_working_directory(here, monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    config = with_absolute_paths(load_run_config(None, ["name=r", *RELATIVE]))
    assert (config.envs.data_path, config.envs.recording) == ("mine.jsonl", "said.jsonl")
    assert config.output_dir == f"{here}/runs"


def test_path_that_is_not_set_stays_so(here):
    config = with_absolute_paths(load_run_config(None, ["name=r"]))
    assert (config.envs.data_path, config.envs.recording, config.reward.prm_path) == (None, None, None)


def test_paths_are_shown_as_a_person_here_would_write_them(here):
    assert shown(here / "runs" / "r") == "runs/r"
    assert shown(here.parent / "other") == str(here.parent / "other")


def test_machine_with_a_folder_of_the_same_name_does_not_see_the_runs(here, tmp_path):
    with RunFolder.create(load_run_config(None, ["name=r"])) as folder:
        other = tmp_path / "other"
        for path, sees in ((folder.path, True), (other, False)):
            assert _sees(path, folder.fingerprint) == sees
        other.mkdir()
        assert not _sees(other, folder.fingerprint)
        (other / "provenance.json").write_text("{}")
        assert not _sees(other, folder.fingerprint)
