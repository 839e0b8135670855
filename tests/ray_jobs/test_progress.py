import pytest

from ray_jobs.run.progress import Training


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ([0.3] * 4, True),
        ([0.3] * 8, False),
        ([0.05] * 4, False),
        ([0.05] * 4 + [0.1] * 4 + [0.2] * 4, True),
        ([0.05] * 4 + [0.5] * 3, False),
    ],
)
@pytest.mark.parametrize("name", ["rollout/failed_share", "rollout/unscored_share"])
def test_a_share_of_attempts_without_an_answer_that_rises_is_told(name, shares, told):
    training = Training([], num_steps=0)
    warnings = [training.add(step, {"step": step, name: share}) for step, share in enumerate(shares, 1)]
    assert [name in one for one in warnings[-1]] == [True] * told
