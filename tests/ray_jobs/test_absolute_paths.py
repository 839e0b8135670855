import pytest

from configs.loading import load_run_config
from ray_jobs.run.folder import RunFolder, fingerprint_of
from ray_jobs.run.origin import with_absolute_paths
from ray_jobs.run.run import _sees

RELATIVE = (
    *("envs.datasets={mine={source='mine.jsonl'}, own={source='a:b'}}", "envs.web.blocked_questions=held.txt"),
    "reward.credit.prm_path=runs/p/prm",
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_paths_for_actors_are_absolute_but_for_the_data_of_a_submitted_job(here, monkeypatch):
    config = with_absolute_paths(load_run_config(None, ["name=r", *RELATIVE]))
    envs = config.envs
    paths = (config.output_dir, config.reward.prm_path, envs.web.blocked_questions, envs.datasets["mine"].source)
    assert paths == tuple(f"{here}/{name}" for name in ("runs", "runs/p/prm", "held.txt", "mine.jsonl"))
    assert envs.datasets["own"].source == "a:b"
    assert with_absolute_paths(config) == config
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    config = with_absolute_paths(load_run_config(None, ["name=r", *RELATIVE]))
    assert (config.envs.datasets["mine"].source, config.envs.web.blocked_questions) == ("mine.jsonl", "held.txt")
    assert config.output_dir == f"{here}/runs"
    config = with_absolute_paths(config, here / "x")
    assert config.envs.datasets["mine"].source == f"{here}/x/mine.jsonl"


def test_fingerprint_distinguishes_folders_of_the_same_name(here, tmp_path):
    with RunFolder.open(load_run_config(None, ["name=r"])) as folder:
        other, fingerprint = tmp_path / "other", fingerprint_of(folder.path)
        for path, sees in ((folder.path, True), (other, False)):
            assert _sees(path, fingerprint) == sees
        other.mkdir()
        assert not _sees(other, fingerprint)
        (other / "provenance.json").write_text("{}")
        assert not _sees(other, fingerprint)
