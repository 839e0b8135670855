from rollout.types import Completion, VersionSwitch


def make_completion(*, num_tokens=5, policy_version=3, switches=()):
    return Completion(
        token_ids=tuple(range(num_tokens)),
        logprobs=(-0.5,) * num_tokens,
        text="x" * num_tokens,
        finish_reason="stop",
        policy_version=policy_version,
        switches=tuple(VersionSwitch(index=index, policy_version=version) for index, version in switches),
    )


def test_without_a_switch_every_token_has_the_version_of_the_first():
    assert make_completion().token_versions == (3, 3, 3, 3, 3)


def test_from_its_index_on_a_switch_is_in_force():
    assert make_completion(switches=[(2, 4)]).token_versions == (3, 3, 4, 4, 4)


def test_each_switch_holds_until_the_next():
    assert make_completion(switches=[(1, 4), (4, 7)]).token_versions == (3, 4, 4, 4, 7)


def test_of_two_switches_at_one_token_the_later_holds():
    assert make_completion(switches=[(2, 4), (2, 5)]).token_versions == (3, 3, 5, 5, 5)


def test_switch_after_the_last_token_sampled_none():
    assert make_completion(switches=[(5, 4)]).token_versions == (3, 3, 3, 3, 3)
    assert make_completion(switches=[(9, 4)]).token_versions == (3, 3, 3, 3, 3)


def test_empty_completion_has_no_versions():
    assert make_completion(num_tokens=0, switches=[(0, 4)]).token_versions == ()
