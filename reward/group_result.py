"""A judged group as the buffer wants it: its ending, bytes, token versions and the numbers that add up."""

from collections import Counter
from dataclasses import asdict

from reward.statistics import group_statistics
from reward.stored import stored_group
from reward.types import ScoredGroup
from rollout.lifecycle import GroupResult
from rollout.types import Trajectory


def group_result(scored: ScoredGroup, *, duration_s: float, prm_s: float) -> GroupResult:
    """`duration_s`: from the permit to the judgement; `prm_s`: of it, waiting for step scores."""
    trajectories = scored.group.trajectories
    ending = scored.ending
    times = {
        "groups": 1.0,
        "kept": float(ending == "ready"),
        "duration_s": duration_s,
        "prm_s": prm_s,
        "generate_s": sum(turn.generate_s for one in trajectories for turn in one.planner_turns),
        "tool_s": sum(turn.tool_s for one in trajectories for turn in one.planner_turns),
    }
    return GroupResult(
        ending=ending,
        payload=stored_group(scored),
        versions=_token_versions(trajectories),
        duration_s=duration_s,
        facts={**asdict(group_statistics(scored)), **times},
        reason=_why_unscorable(scored),
    )


def failed_result(error: Exception) -> GroupResult:
    """A group whose rollout raised: nothing can be said of its trajectories."""
    reason = f"{type(error).__name__}: {error}"[:300]
    return GroupResult(ending=None, payload=b"", versions={}, facts={"groups": 1.0}, reason=reason)


def _token_versions(trajectories: tuple[Trajectory, ...]) -> dict[int, int]:
    """Sampled planner tokens by the version that sampled them."""
    return dict(
        Counter(
            version for one in trajectories for turn in one.planner_turns for version in turn.completion.token_versions
        )
    )


def _why_unscorable(scored: ScoredGroup) -> str:
    stops = Counter(
        one.stop_reason
        for one, outcome in zip(scored.group.trajectories, scored.outcomes, strict=True)
        if outcome is None
    )
    return ", ".join(f"{num} of {len(scored.outcomes)} {stop}" for stop, num in stops.items())
