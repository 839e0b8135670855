import ray
from ray.exceptions import RayActorError

from actors.cluster import is_lost, reason_of


def died(*lines):
    return RayActorError("0" * 32, "\n".join(lines))


def test_reason_is_the_cause_of_a_failed_call_or_what_the_constructor_of_an_actor_raised():
    ray_line = "The actor died because of an error raised in its creation task, ray::S()"
    assert reason_of(died(ray_line, "rollout.files.DiskError: no space")) == "DiskError: no space"
    error = RuntimeError("ray::Learner")
    error.cause = ValueError("the disk is full\nat line 7")
    assert reason_of(error) == "the disk is full"
    assert reason_of(ValueError()) == "ValueError"


def test_actor_is_not_lost_where_it_called_one_that_is():
    assert is_lost(died("dead"))
    assert not is_lost(ray.exceptions.RayTaskError("publish", "", died("dead")).as_instanceof_cause())
