from ray.exceptions import RayActorError

from actors.cluster import reason_of, unmade


def died(*lines):
    return RayActorError("0" * 32, "\n".join(lines))


def test_reason_of_an_actor_that_could_not_be_made_is_what_it_raised():
    error = died("The actor died because of an error raised in its creation task, ray::S()", "  File x", "E: full")
    assert reason_of(error) == "E: full"


def test_what_an_actor_raised_while_it_was_made_is_told_whole_and_without_its_class():
    why = f"{'/deep' * 60}/ledger.sqlite is no ledger of this release; begin a new run"
    ray = "The actor died because of an error raised in its creation task, ray::Store()"
    assert unmade(died(ray, "  File x", f"rollout.store.ledger_file.LedgerError: {why}")) == why
    assert unmade(died(ray, "KeyError: 'x'")) == "KeyError: 'x'"
    assert unmade(died("The actor died unexpectedly.")) is None


def test_reason_of_a_dead_actor_is_in_one_line_with_its_class():
    error = died("The actor died unexpectedly.", "\tclass_name: StoreActor", "\tpid: 7")
    assert reason_of(error) == "The actor died unexpectedly. (class_name: StoreActor)"


def test_error_without_words_has_its_name():
    assert reason_of(ValueError()) == "ValueError"


def test_what_an_actor_raised_goes_before_what_ray_says_of_it():
    error = RuntimeError("ray::Learner")
    error.cause = ValueError("the disk is full\nat line 7")
    assert reason_of(error) == "the disk is full"
