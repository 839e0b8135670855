"""What the deaths of workers say of the groups that they ran.

A worker may die over one of its groups, and then all of them die with it. No single death tells which; but a group that
was aboard twice is a suspect, and suspects run one at a time. Only what dies with a group that ran alone counts against
that group. All of it is forgotten with the process that holds it: then two more deaths tell it again.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

SUSPECT_AFTER = 2
"""Deaths of workers after which a group that was aboard of each runs alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a worker left behind that is gone. `num_groups`: those that it ran. `fruitless`: it had ended no group since
    it came. `explained`: it ran one suspect alone, and while that was suspected other groups ended, or it has failed
    for good."""

    num_groups: int
    fruitless: bool = False
    explained: bool = False


class Casualties:
    """Groups by their ordinal, workers by their index."""

    def __init__(self) -> None:
        self._deaths: Counter[int] = Counter()
        self._excused: Counter[int] = Counter()
        self._suspected_at: dict[int, int] = {}
        self._num_ended = 0
        self._fruitful: set[int] = set()

    @property
    def suspects(self) -> frozenset[int]:
        return frozenset(self._suspected_at)

    def by_suspicion(self, groups: Collection[int]) -> list[int]:
        """Those first with which the fewest workers died, so that others have their turn before one that killed."""
        return sorted(groups, key=lambda group: (self._deaths[group], group))

    def excused(self, group: int) -> int:
        """Attempts that ended in a death beside other groups, and do not count."""
        return self._excused[group]

    def is_fruitless(self, worker: int) -> bool:
        """Whether no group has ended on this worker since it came."""
        return worker not in self._fruitful

    def died(self, worker: int, groups: Collection[int]) -> bool:
        """The worker is gone with these groups. Returns whether one of them is to blame, and not the worker."""
        self._fruitful.discard(worker)
        for group in groups:
            self._deaths[group] += 1
            self._excused[group] += len(groups) > 1
            if self._deaths[group] >= SUSPECT_AFTER:
                self._suspected_at.setdefault(group, self._num_ended)
        return len(groups) == 1 and all(
            self._num_ended > self._suspected_at.get(one, self._num_ended) for one in groups
        )

    def survived(self, worker: int, group: int) -> bool:
        """The group came to an end, of whatever kind, and the worker lives. Returns whether it was a suspect."""
        self._fruitful.add(worker)
        self._num_ended += 1
        suspected = group in self._suspected_at
        self.forget(group)
        return suspected

    def forget(self, group: int) -> None:
        """Nobody will run this group again, or it has shown that it kills nobody."""
        self._deaths.pop(group, None)
        self._suspected_at.pop(group, None)
