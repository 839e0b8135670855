"""Two knobs against stale data: the pipeline depth D sets how old it is on average, the cap S bounds how old at most.

Tokens beyond S are taken out of the loss; a trajectory is never cancelled for its age, because what takes long is
what is hard, and cancelling it would quietly remove hard tasks from training.
"""

from collections.abc import Mapping, Sequence

from rollout.lifecycle import WITH_SIGNAL, State

LEAST_FRESH_SHARE = 0.1
"""A group with a smaller share of its tokens within the cap is expired, and its task is drawn again."""


def oldest_trained_version(published: Mapping[int, int], *, max_staleness: int) -> int:
    """The oldest version whose tokens may still be trained on: S train steps behind the newest.

    `published`: the step after which each version was published. Steps and not numbers, because a run that is cut off
    publishes the weights of a step again under a new number, which makes nothing older. Where steps were taken back,
    tokens may be trained on that are beyond the cap by as many steps, until these are made again.
    """
    first = published[max(published)] - max_staleness
    oldest = min(version for version, step in published.items() if step >= first)
    return oldest - max(0, published[oldest] - first)


def version_ages(published: Mapping[int, int], *, oldest_version: int, same_again: bool = False) -> dict[int, int]:
    """Return the train steps between each version from `oldest_version` on and the newest weights.

    Versions with the same weights have the same age, under whatever number.

    `published`: the step after which each version was published, at least one. Of a version that it lacks between two
    others, a crash came before its step was noted: it is the step after the one before. A version whose step was taken
    back, as by a newer one of an earlier step, is at least 1: the step was made again since, with another outcome; with
    `same_again`, as in a synchronous run, with the same.
    """
    first, last = min(published), max(published)
    steps = {first: published[first]}
    for version in range(first + 1, last + 1):
        steps[version] = published.get(version, steps[version - 1] + 1)
    earliest, ages = steps[last], {}
    for version in range(last, max(first, oldest_version) - 1, -1):
        ages[version] = max(abs(steps[last] - steps[version]), int(steps[version] > earliest and not same_again))
        earliest = min(earliest, steps[version])
    return ages


def fresh_share(versions: Mapping[int, int], *, ages: Mapping[int, int]) -> float:
    """The share of a group's tokens that the learner will train on; 1 for a group without tokens.

    `versions`: number of tokens by the policy version that sampled them. `ages`: those of the versions within the cap.
    A version beyond all of them is fresh, too: workers sample with new weights as soon as they are published, and their
    step is noted after its metrics and its evaluation.
    """
    total = sum(versions.values())
    fresh = sum(num for version, num in versions.items() if version in ages or version > max(ages))
    return fresh / total if total else 1.0


def bias_metrics(groups: Sequence[tuple[State, float, int]]) -> dict[str, float]:
    """Return metrics that compare trained with drawn groups.

    `groups`: state, seconds and tokens of the groups that ended last.

    bias/length_trained_over_drawn: mean tokens of trained groups over those of all groups with signal.
    bias/slow_decile_share: share of trained groups among whose with signal the slowest tenth are; 0.1 is unbiased.
    The result is empty while there are fewer than ten trained groups.
    """
    signal = [group for group in groups if group[0] in WITH_SIGNAL]
    trained = [group for group in signal if group[0] in (State.IN_BATCH, State.TRAINED)]
    if len(trained) < 10:
        return {}
    slow = sorted(seconds for _, seconds, _ in signal)[int(0.9 * len(signal))]
    drawn_tokens = sum(tokens for *_, tokens in signal) / len(signal)
    return {
        "bias/length_trained_over_drawn": sum(tokens for *_, tokens in trained) / len(trained) / max(drawn_tokens, 1),
        "bias/slow_decile_share": sum(seconds >= slow for _, seconds, _ in trained) / len(trained),
    }
