import pytest

from ray_jobs.checks.chaos.job import part_of


@pytest.mark.parametrize(
    ("title", "part"),
    [
        ("ray::agentflow:demo:rollout-0#2:RolloutWorkerActor.__init__", "rollout"),
        ("ray::RolloutWorkerActor.run", "rollout"),
        ("ray::LearnerActor", "learner"),
        ("ray::PrmActor.score_group", "prm"),
        ("ray::StoreActor", "store"),
        ("ray::IDLE", None),
        ("grep RolloutWorkerActor", None),
    ],
)
def test_part_is_known_by_its_process_s_title_from_the_start_of_its_actor_on(title, part):
    assert part_of(title) == part
