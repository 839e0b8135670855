"""The PRM's actor as a plain object, around a model that is none."""

import pytest

from actors import prm as prm_module
from configs.reward import PrmConfig
from reward.judging import PrmError
from rollout.types import Group, StepScores

GROUP = Group(id="g000000", trajectories=())


class Model:
    def __init__(self, *_, **__):
        self.digest = ""

    def load(self, folder):
        self.digest = (folder / "digest").read_text()


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(prm_module, "ProcessRewardModel", Model)
    plain = prm_module.PrmActor.__ray_metadata__.modified_class
    return lambda: plain(PrmConfig(), tmp_path / "base", 0, tmp_path / "prm")


async def test_prm_that_was_started_again_without_its_weights_scores_nothing(tmp_path, start):
    (tmp_path / "prm").mkdir()
    (tmp_path / "prm" / "digest").write_text("a" * 64)
    assert await start().score_group(GROUP, "a" * 64) == StepScores(raw=(), prm_digest="a" * 64)
    (tmp_path / "prm").rename(tmp_path / "unmounted")
    with pytest.raises(PrmError, match=r"untrained.* aaaaaaaaaaaa: .*/prm'"):
        await start().score_group(GROUP, "a" * 64)


async def test_prm_that_is_not_trained_yet_is_asked_without_a_digest(start):
    assert (await start().score_group(GROUP)).prm_digest == ""
