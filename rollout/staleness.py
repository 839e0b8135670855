"""Two knobs against stale data: the pipeline depth D sets how old it is on average, the cap S bounds how old at most.

Tokens beyond S are taken out of the loss; a trajectory is never cancelled for its age, because what takes long is
what is hard, and cancelling it would quietly remove hard tasks from training.
"""

from collections.abc import Mapping, Sequence

from rollout.lifecycle import State

LEAST_FRESH_SHARE = 0.1
"""A group with a smaller share of its tokens within the cap is expired, and its task is drawn again."""

WITH_SIGNAL: frozenset[State] = frozenset({"ready", "in_batch", "trained", "expired"})


def oldest_trained_version(policy_version: int, *, max_staleness: int) -> int:
    """The oldest version whose tokens may still be trained on, S versions behind the learner's."""
    return policy_version - max_staleness


def fresh_share(versions: Mapping[int, int], *, oldest_version: int) -> float:
    """The share of a group's tokens that were sampled by `oldest_version` or later; 1 for a group without tokens.

    `versions`: number of tokens by the policy version that sampled them.
    """
    total = sum(versions.values())
    return sum(num for version, num in versions.items() if version >= oldest_version) / total if total else 1.0


def bias_metrics(groups: Sequence[tuple[State, float, int]]) -> dict[str, float]:
    """Whether what is trained is what was drawn: (state, seconds, tokens) of the groups that ended lately.

    bias/length_trained_over_drawn: mean tokens of trained groups over those of all groups with signal.
    bias/slow_decile_share: share of trained groups among whose with signal the slowest tenth are; 0.1 is unbiased.
    Nothing while there are fewer than ten trained groups.
    """
    signal = [group for group in groups if group[0] in WITH_SIGNAL]
    trained = [group for group in signal if group[0] in ("in_batch", "trained")]
    if len(trained) < 10:
        return {}
    slow = sorted(seconds for _, seconds, _ in signal)[int(0.9 * len(signal))]
    drawn_tokens = sum(tokens for *_, tokens in signal) / len(signal)
    return {
        "bias/length_trained_over_drawn": sum(tokens for *_, tokens in trained) / len(trained) / max(drawn_tokens, 1),
        "bias/slow_decile_share": sum(seconds >= slow for _, seconds, _ in trained) / len(trained),
    }
