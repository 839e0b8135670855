"""A group whose attempts all fail gets forks; what they bring is judged like any group."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from configs.rollout import NoRestartsConfig, RestartsConfig
from reward.judging import GroupJudge, seconds_of
from reward.types import ScoredGroup
from rollout.restarts import Anchor, choose_anchor
from rollout.types import TrajectoryGroup


class Forking(Protocol):
    async def fork(self, group: TrajectoryGroup, anchor: Anchor, *, round_: int) -> tuple[TrajectoryGroup, int]:
        """New ends of one of the group's trajectories, without those whose replay is not exact; and how many tokens
        were sampled for all of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The group to be trained on, and what its forks cost. `facts` are counts that add up over groups."""

    scored: ScoredGroup
    facts: Mapping[str, float]


class Restarter:
    """Asks `worker` for forks of groups that are all wrong, as often as the recipe says."""

    def __init__(self, config: RestartsConfig, worker: Forking, judge: GroupJudge, *, seed: int) -> None:
        self._config = config
        self._worker = worker
        self._judge = judge
        self._seed = seed

    async def revive(self, roots: ScoredGroup) -> Forked:
        """The forks where they have signal, else the group as it was. The rounds go on from the anchor, then from one
        turn earlier each."""
        if isinstance(self._config, NoRestartsConfig) or roots.ending != "all_wrong":
            return Forked(scored=roots, facts={})
        anchor = choose_anchor(roots.group, self._config, seed=self._seed)
        facts = {"dead_groups": 1.0, "anchored_groups": 0.0, "revived_groups": 0.0, "forks": 0.0}
        facts |= {"fork_tokens": 0.0, "inexact_forks": 0.0, "generate_s": 0.0, "tool_s": 0.0}
        if anchor is None:
            return Forked(scored=roots, facts=facts)
        facts["anchored_groups"] = 1.0
        for round_ in range(1, min(self._config.rounds, anchor.num_turns) + 1):
            forks, num_tokens = await self._worker.fork(roots.group, anchor, round_=round_)
            facts["forks"] += len(forks.trajectories)
            facts["inexact_forks"] += len(roots.group.trajectories) - len(forks.trajectories)
            facts["fork_tokens"] += num_tokens
            for name, seconds in seconds_of(forks).items():
                facts[name] += seconds
            scored = await self._judge.judge(forks)
            if scored.ending == "ready":
                facts["revived_groups"] = 1.0
                return Forked(scored=replace(scored, anchor=anchor, roots=roots), facts=facts)
            anchor = replace(anchor, num_turns=anchor.num_turns - 1)
        return Forked(scored=roots, facts=facts)


def all_sampled_tokens(facts: Mapping[str, float]) -> float:
    """Those of roots and forks, from facts that were added up over groups."""
    return facts.get("sampled_tokens", 0.0) + facts.get("fork_tokens", 0.0)


def restart_metrics(facts: Mapping[str, float]) -> dict[str, float]:
    """From facts that were added up over groups; nothing where no group could get forks."""
    dead = facts.get("dead_groups", 0.0)
    if not dead:
        return {}
    sampled = all_sampled_tokens(facts)
    return {
        "restarts/dead_groups": dead,
        "restarts/anchored_share": facts["anchored_groups"] / dead,
        "restarts/revived_share": facts["revived_groups"] / dead,
        "restarts/inexact_forks": facts["inexact_forks"],
        "restarts/fork_token_share": facts["fork_tokens"] / sampled if sampled else 0.0,
        "restarts/revived_per_1000_tokens": 1000 * facts["revived_groups"] / max(1.0, facts["fork_tokens"]),
    }
