"""Starvation: what to do when group after group carries no signal. Warn, then train on what there is, then give up."""

from rollout.lifecycle import GroupCounts


class StarvedError(RuntimeError):
    """So many groups in a row carried no signal that training cannot go on; the message says which kind."""


class StarvationGuard:
    """Counts groups without signal since the last one with. A third of the bound is worth a warning, at two thirds a
    smaller batch is better than none, at the bound waiting has no point any more."""

    def __init__(self, max_groups: int, num_without_signal: int) -> None:
        self._max_groups = max_groups
        self._num_without_signal = num_without_signal
        self._most = num_without_signal

    def observe(self, *, signal: bool) -> None:
        self._num_without_signal = 0 if signal else self._num_without_signal + 1
        self._most = max(self._most, self._num_without_signal)

    def begin_batch(self) -> None:
        """Rows that are over have been warned of."""
        self._most = self._num_without_signal

    @property
    def warns(self) -> bool:
        """Judged by the longest row since the batch before: what ends a row is what fills the batch."""
        return self._most >= max(1, self._max_groups // 3)

    @property
    def relaxes(self) -> bool:
        return self._num_without_signal >= max(1, 2 * self._max_groups // 3)

    @property
    def gives_up(self) -> bool:
        return self._num_without_signal >= self._max_groups

    def diagnosis(self, counts: GroupCounts, reasons: dict[str, int]) -> str:
        """What happened to the groups, and what to do. `reasons`: why groups failed or expired, with how many each."""
        named = ", ".join(f"{num} x {reason}" for reason, num in reasons.items())
        return (
            f"{self._most} groups in a row carried no signal (bound {self._max_groups}); of all "
            f"{counts.drawn} drawn, {counts.all_right} were all right, {counts.all_wrong} all wrong, "
            f"{counts.overlong} overlong, {counts.failed} failed, {counts.expired} expired"
            f"{f' ({named})' if named else ''}. Make the tasks easier (all wrong) or harder (all right), raise "
            "rollout.max_turn_tokens (overlong), or raise max_empty_batches"
        )
