"""Deaths between two train steps: which of them are bad luck, and which a loop that a new process does not mend."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from configs.errors import UserError

MAX_DEATHS = 5
"""Deaths of one part between two train steps, and events in which workers died that had finished nothing. One more
ends the run."""
ONE_EVENT_S = 30.0
"""Workers of one machine that die within so many seconds die of one cause: it was lost, or its memory was short."""


class CrashLoopError(UserError):
    """Parts of the run die faster than it gets anywhere; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """`node`: the machine on which the part ran. `fruitless`: a rollout worker that had finished nothing since it was
    started, neither a group for training nor an attempt of this phase. `explained`: the group that the worker ran alone
    is to blame, and will fail for good."""

    part: str
    reason: str
    node: str | None = None
    fruitless: bool = False
    explained: bool = False

    @property
    def news(self) -> str:
        """What the console says of it."""
        return f"the {self.part} was lost and is replaced ({self.reason})"


@dataclass(slots=True)
class _Event:
    """Fruitless deaths of one cause."""

    node: str | None
    began: float
    parts: set[str] = field(default_factory=set)


class Deaths:
    """Counts them. A part that dies again and again is a crash loop, and so are workers that die before they have
    finished anything; many workers that are lost with their machine are one event."""

    def __init__(
        self,
        *,
        advice: str,
        clock: Callable[[], float] = time.monotonic,
        before: int = 0,
        counted: Callable[[int], object] = int,
    ) -> None:
        """`advice`: what a person is to do who reads of a crash loop. `before`: those in processes of the run that were
        cut off; `counted` hears with each death how many there were."""
        self._advice = advice
        self._clock = clock
        self._reasons: list[str] = []
        self._by_part: Counter[str] = Counter()
        self._fruitless: list[_Event] = []
        self._verdict: CrashLoopError | None = None
        self._lock = threading.Lock()
        self._counted = counted
        self.total = before
        """Since the run began."""

    def add(self, death: Death) -> None:
        """Raises CrashLoopError, the same again once it was raised: what follows a crash loop is not its reason."""
        with self._lock:
            self.total += 1
            self._counted(self.total)
            if self._verdict is None and not death.explained:
                self._verdict = self._judged(death)
        self.check()

    def check(self) -> None:
        """Raises CrashLoopError where there was one."""
        if self._verdict is not None:
            raise self._verdict

    def progressed(self) -> None:
        """A train step ended: what died before it did no lasting harm."""
        with self._lock:
            self._reasons.clear()
            self._by_part.clear()
            self._fruitless.clear()

    def _judged(self, death: Death) -> CrashLoopError | None:
        self._reasons.append(f"{death.part}: {death.reason}")
        self._by_part[death.part] += 1
        if death.fruitless:
            self._join_event(death)
        if self._by_part[death.part] > MAX_DEATHS:
            return self._crash_loop(f"the {death.part} died {self._by_part[death.part]} times")
        if len(self._fruitless) > MAX_DEATHS:
            return self._crash_loop(f"{len(self._fruitless)} times workers died that had finished nothing")
        return None

    def _join_event(self, death: Death) -> None:
        now = self._clock()
        for event in self._fruitless:
            if event.node == death.node and now - event.began <= ONE_EVENT_S and death.part not in event.parts:
                event.parts.add(death.part)
                return
        self._fruitless.append(_Event(node=death.node, began=now, parts={death.part}))

    def _crash_loop(self, what: str) -> CrashLoopError:
        last = "; ".join(self._reasons[-3:])
        return CrashLoopError(f"{what} since the last train step (bound {MAX_DEATHS}): {last}; {self._advice}")
