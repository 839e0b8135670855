from ray.exceptions import RayActorError

from actors.cluster import reason_of


def died(*lines):
    return RayActorError("0" * 32, "\n".join(lines))


def test_reason_is_the_cause_of_a_failed_call_or_what_the_constructor_of_an_actor_raised():
    ray_line = "The actor died because of an error raised in its creation task, ray::S()"
    assert reason_of(died(ray_line, "rollout.files.DiskError: no space")) == "DiskError: no space"
    error = RuntimeError("ray::Learner")
    error.cause = ValueError("the disk is full\nat line 7")
    assert reason_of(error) == "the disk is full"
    assert reason_of(ValueError()) == "ValueError"
