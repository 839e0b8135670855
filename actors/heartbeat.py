"""Detection of parts that live but do nothing: stopped processes, blocked event loops, engines without progress."""

import asyncio
from collections import deque
from statistics import median

import ray

from actors.cluster import Handle
from rollout.engines.engine import Pulse

BEAT_EVERY_S = 20.0
"""Time between an answer and the next call."""


class Watched:
    """The calls of an actor by which the supervisor watches it."""

    async def heartbeat(self) -> Pulse:
        """Show that the event loop runs."""
        return Pulse()

    async def until_lost(self) -> None:
        """Wait until this process ends, which fails the call."""
        await asyncio.Event().wait()


class Bound:
    """Time limit of a repeated call: 20 times the median of what was measured, and at least `floor_s`.

    Before the first call has ended it is `first_s`: that one may compile, load or download.
    """

    def __init__(self, *, floor_s: float, first_s: float) -> None:
        self._floor_s = floor_s
        self._first_s = first_s
        self._measured: deque[float] = deque(maxlen=64)

    def observe(self, seconds: float) -> None:
        self._measured.append(seconds)

    @property
    def seconds(self) -> float:
        return max(self._floor_s, 20 * median(self._measured)) if self._measured else self._first_s


class Heartbeat:
    """Calls `heartbeat` of an actor again and again. While work is open, the amount of finished work must grow."""

    def __init__(self, actor: Handle, *, floor_s: float, start_s: float) -> None:
        self._actor = actor
        self._bound = Bound(floor_s=floor_s, first_s=floor_s)
        self._start_s = start_s
        self._call: ray.ObjectRef[Pulse] | None = None
        self._pulse: Pulse | None = None
        self._silent_s = 0.0
        """Time since the call that has no answer yet."""
        self._stalled_s = 0.0
        """Time since the last progress while something was open."""
        self._rested_s = BEAT_EVERY_S

    @property
    def started(self) -> bool:
        """True once the actor has answered."""
        return self._pulse is not None

    @property
    def waited_s(self) -> float:
        """Seconds without an answer or without progress."""
        return max(self._silent_s, self._stalled_s)

    @property
    def limit_s(self) -> float:
        return self._bound.seconds if self.started else self._start_s

    def __str__(self) -> str:
        if self._stalled_s > self._silent_s:
            state = "has made no progress on open work"
        else:
            state = "has not answered" if self.started else "has not started"
        return f"{state} for {self.waited_s:.0f} s (limit {self.limit_s:.0f} s)"

    def look(self, tick: float) -> None:
        """Take an answer if there is one; `tick` seconds have passed since the last look."""
        if self._call is None:
            self._rested_s += tick
            if self._rested_s < BEAT_EVERY_S and self.started:
                return
            self._call = self._actor.heartbeat.remote()
        if not ray.wait([self._call], timeout=0)[0]:
            self._silent_s += tick
            return
        call, self._call = self._call, None
        try:
            pulse = ray.get(call)
        except ray.exceptions.RayError:
            # `Part.lost` finds a dead actor; one that takes no calls counts as silent and is called again.
            self._silent_s += tick
            self._rested_s = BEAT_EVERY_S
            return
        if self._pulse is not None:
            self._bound.observe(self._silent_s)
            is_stalled = pulse.num_open and self._pulse.num_open and pulse.done == self._pulse.done
            self._stalled_s = self._stalled_s + self._silent_s + self._rested_s if is_stalled else 0.0
        self._pulse, self._silent_s, self._rested_s = pulse, 0.0, 0.0
