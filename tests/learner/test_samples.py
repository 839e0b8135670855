import pytest

from learner.packing import build_batch, group_samples, samples_of
from rollout.types import Group, Reward, TextCompletion, Turn
from tests.changed import replace
from tests.reward.test_step_text import completion, make_trajectory, sampled


def make_turn(prompt, tokens, *, version, switches=()):
    logprobs = tuple(-0.1 * token for token in tokens)
    said = replace(completion(token_ids=tuple(tokens)), logprobs=logprobs, policy_version=version, switches=switches)
    return sampled(tuple(prompt), said)


def make_group(*trajectories):
    for trajectory in trajectories:
        trajectory.reward = Reward(outcome=1.0, total=1.0)
    return Group(id="g", trajectories=trajectories)


def switching_trajectory():
    """Two prompt tokens, a turn of version 3 that switched to 4 at its third token, a bridge, a turn of version 5."""
    first = make_turn([1, 2], [11, 12, 13, 14], version=3, switches=((2, 4),))
    return make_trajectory(first, make_turn([1, 2, 11, 12, 13, 14, 9], [15, 16], version=5))


@pytest.mark.parametrize(
    ("ages", "trained", "masked"),
    [
        *(({3: 2, 4: 1, 5: 0}, [2, 3, 4, 5, 7, 8], 0), ({4: 1, 5: 0}, [4, 5, 7, 8], 2)),
        *(({5: 0}, [7, 8], 4), ({6: 0}, [], 6)),
    ],
)
def test_exactly_the_tokens_of_older_versions_leave_the_loss_even_in_the_middle_of_a_turn(ages, trained, masked):
    (sample,) = samples_of(switching_trajectory(), [0.5, 1.0], temperature=1.0, version_ages=ages)
    assert sample.loss_mask.nonzero()[0].tolist() == trained
    assert sample.num_masked_tokens == masked
    versions = [None, None, 3, 3, 4, 4, None, 5, 5]
    assert sample.ages[trained].tolist() == [ages[versions[position]] for position in trained]
    for array, outside in ((sample.ages, -1), (sample.advantages, 0), (sample.rollout_logprobs, 0)):
        assert set(array[~sample.loss_mask].tolist()) <= {outside}
    assert sample.rollout_logprobs[trained] == pytest.approx([-0.1 * sample.token_ids[i] for i in trained])


def test_trajectory_with_nothing_left_is_out_of_the_batch_but_its_masked_tokens_are_counted():
    old, fresh = make_turn([1], [11, 12, 13], version=2), make_turn([1], [14], version=7)
    group = make_group(make_trajectory(old, id="t"), make_trajectory(fresh, id="f"))
    samples = group_samples(group, temperature=1.0, version_ages={7: 4, 11: 0})
    batch = build_batch(samples, microbatch_tokens=100)
    assert [one.trajectory_id for rows in batch.microbatches for one in rows] == ["f"]
    assert (batch.num_trajectories, batch.num_loss_tokens, batch.num_masked_tokens) == (1, 1, 3)
    assert batch.max_age == 4


def test_the_branches_of_a_trajectory_that_train_share_its_weight():
    """Of four branches, one has no token left that trains."""
    turns = [make_turn([first], [11], version=version) for first, version in ((1, 7), (2, 7), (3, 7), (4, 2))]
    group = make_group(make_trajectory(*turns, id="t"), make_trajectory(make_turn([1], [14], version=7), id="f"))
    batch = build_batch(group_samples(group, temperature=1.0, version_ages={7: 0}), microbatch_tokens=100)
    (rows,) = batch.microbatches
    assert {row.name: row.weight for row in rows} == {"t": 1 / 3, "t#1": 1 / 3, "t#2": 1 / 3, "f": 1.0}
    assert (batch.num_trajectories, batch.num_loss_tokens, batch.num_masked_tokens) == (2, 4, 1)


def test_what_a_server_answered_is_refused_by_name():
    completion = TextCompletion(text="{}", finish_reason="stop", num_prompt_tokens=9, num_tokens=2)
    turn = Turn.of(role="planner", prompt_token_ids=(), completion=completion, trainable=False)
    with pytest.raises(ValueError, match="trajectory t"):
        samples_of(make_trajectory(turn, id="t"), [1.0], temperature=1.0)


def branching_trajectory():
    """A turn, one that goes on from it, one that goes on from the first in another way, and one of another dialogue."""
    turns = (([1], [11, 12]), ([1, 11, 12, 2], [13]), ([1, 11, 12, 3], [14]), ([7], [15]))
    turns += (([1, 11, 12, 3, 14, 4], [16]),)
    return make_trajectory(*(make_turn(*one, version=1) for one in turns), id="t")


def test_each_sampled_token_of_a_branching_trajectory_is_trained_once_after_what_it_was_sampled_after():
    assert branching_trajectory().branches == ((0, 1), (2, 4), (3,))
    samples = samples_of(branching_trajectory(), [1.0, 2.0, 3.0, 4.0, 5.0], temperature=1.0)
    assert [one.token_ids.tolist() for one in samples] == [[1, 11, 12, 2, 13], [1, 11, 12, 3, 14, 4, 16], [7, 15]]
    assert [one.advantages.tolist() for one in samples] == [[0, 1, 1, 0, 2], [0, 0, 0, 0, 3, 0, 5], [0, 4]]
    assert [one.turn_ids.tolist() for one in samples] == [[-1, 0, 0, -1, 1], [-1, -1, -1, -1, 2, -1, 4], [-1, 3]]
    assert [one.name for one in samples] == ["t", "t#1", "t#2"]
    trained = [token for one in samples for token in one.token_ids[one.loss_mask].tolist()]
    assert sorted(trained) == [11, 12, 13, 14, 15, 16]


def test_a_turn_goes_on_with_the_longest_branch_that_it_continues():
    turns = (([1], [11]), ([1], [11, 12]), ([1, 11, 12, 2], [13]))
    assert make_trajectory(*(make_turn(*one, version=1) for one in turns)).branches == ((0,), (1, 2))
