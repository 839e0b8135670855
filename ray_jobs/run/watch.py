"""Watches the actors of a run from a thread: what hangs is killed, then replaced like what dies."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING

import ray

from actors.cluster import PART_LOST, kill, num_restarts, reason_of
from configs.cluster import LivenessConfig
from ray_jobs.run.deaths import CrashLoopError, Death, Deaths
from rollout.engines.engine import Pulse

if TYPE_CHECKING:
    from actors.handles import Beating

TIMES_MEDIAN = 20
REMEMBERED = 64


class Patience:
    """`floor_s`: the least bound, so that a part on a busy machine is not taken for one that hangs. `first_s`: the
    bound while nothing was measured; a first call may compile, load or download."""

    def __init__(self, *, floor_s: float, first_s: float) -> None:
        self._floor_s = floor_s
        self._first_s = max(floor_s, first_s)
        self._measured: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, seconds: float) -> None:
        """What it took this time."""
        self._measured.append(seconds)

    @property
    def bound_s(self) -> float:
        if not self._measured:
            return self._first_s
        return max(self._floor_s, TIMES_MEDIAN * median(self._measured))


LOOK_EVERY_S = 1.0
BEAT_EVERY_S = 20.0
"""From one answer to the next question."""
LIVES_EVERY_S = 2.0
LATE_AFTER_S = 20.0
"""A part that has been asked for so long is named where the console says what is waited for."""
LONGEST_TICK_S = 5 * LOOK_EVERY_S


@dataclass(slots=True, kw_only=True)
class _Part:
    """One actor. `beat` is what it was asked and has not answered; `pulse` the last answer in this life, None while it
    starts. `silent_s` counts from the question, `stalled_s` from the last progress with something open."""

    name: str
    actor: "Beating"
    patience: Patience
    start_s: float
    restarts: bool
    beat: "ray.ObjectRef[Pulse] | None" = None
    pulse: Pulse | None = None
    silent_s: float = 0.0
    stalled_s: float = 0.0
    rested_s: float = BEAT_EVERY_S
    num_restarts: int = 0


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call of a part that answers nothing else meanwhile."""

    part: str
    actor: object
    what: str
    patience: Patience
    waited_s: float = 0.0


class Watch(AbstractContextManager["Watch"]):
    """While it is open, its thread looks after what it was told to `follow`."""

    def __init__(
        self,
        settings: LivenessConfig,
        *,
        resume: str,
        note: Callable[[str], object] = str,
        deaths_before: int = 0,
        counted: Callable[[int], object] = int,
    ) -> None:
        """`resume`: the command that goes on with the run. `deaths_before` and `counted`: see `Deaths`."""
        self.settings = settings
        advice = f"read the actors' logs, mend the cause and go on with {resume}"
        self.deaths = Deaths(advice=advice, before=deaths_before, counted=counted)
        self._note = note
        self._patience: dict[str, Patience] = {}
        """By the kind of beat or call."""
        self._lock = threading.Lock()
        self._parts: dict[str, _Part] = {}
        self._calls: list[_Call] = []
        self._killed: dict[str, str] = {}
        self._lives_rested_s = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        if isinstance(exc, PART_LOST):
            # What was started in vain too often is dead for good, and that is the reason.
            self.deaths.check()

    # --- called by whoever starts and asks actors -------------------------------------------------

    def follow(self, name: str, actor: "Beating", *, kind: str, floor_s: float, restarts: bool = False) -> None:
        """From now on ask this actor for its `heartbeat`. `kind`: parts of one kind answer alike. `restarts`: Ray
        starts it again when it dies, so that its deaths are told and counted here."""
        patience = self._patience.setdefault(kind, Patience(floor_s=floor_s, first_s=floor_s))
        start_s = max(floor_s, self.settings.start_s)
        part = _Part(name=name, actor=actor, patience=patience, start_s=start_s, restarts=restarts)
        with self._lock:
            self._parts[name] = part

    def leave(self, name: str) -> None:
        """The actor is ended on purpose, or dead."""
        with self._lock:
            self._parts.pop(name, None)

    @contextmanager
    def call(self, part: str, actor: object, what: str) -> Iterator[None]:
        """The body waits for a call of an actor. It is killed where that takes too long; then the call raises."""
        first = Patience(floor_s=self.settings.work_s, first_s=self.settings.start_s)
        patience = self._patience.setdefault(f"{part} {what}", first)
        call = _Call(part=part, actor=actor, what=what, patience=patience)
        with self._lock:
            self._calls.append(call)
        try:
            yield
            call.patience.observe(call.waited_s)
        finally:
            with self._lock:
                self._calls.remove(call)

    def why(self, part: str) -> str | None:
        """Why a part was killed here, once; None where it died by itself."""
        return self._killed.pop(part, None)

    def num_deaths(self) -> int:
        """Of all parts, since the run began."""
        with self._lock:
            parts = list(self._parts.values())
        for part in parts:
            self._see_restarts(part)
        return self.deaths.total

    def late(self) -> str:
        """Who has not answered for long, in words; empty where nobody."""
        with self._lock:
            parts = [part for part in self._parts.values() if max(part.silent_s, part.stalled_s) >= LATE_AFTER_S]
            calls = [call for call in self._calls if call.waited_s >= LATE_AFTER_S]
        said = [f"the {part.name} {_trouble(part)} (bound {_bound_s(part):.0f} s)" for part in parts]
        said += [f"the {call.part}'s {call.what} takes {call.waited_s:.0f} s so far" for call in calls]
        return "".join(f"; {one}" for one in said)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        before = time.monotonic()
        while not self._ending.wait(LOOK_EVERY_S):
            now = time.monotonic()
            tick = min(now - before, LONGEST_TICK_S)
            before = now
            try:
                self.look(tick)
            except Exception as error:
                # The cluster may be short of answers itself; it is asked again.
                logging.getLogger(__name__).warning("the watch could not look around: %s", reason_of(error))

    def look(self, tick: float) -> None:
        """So many seconds have gone by."""
        with self._lock:
            parts, calls = list(self._parts.values()), list(self._calls)
        self._lives_rested_s += tick
        if self._lives_rested_s >= LIVES_EVERY_S:
            self._lives_rested_s = 0.0
            for part in parts:
                self._see_restarts(part)
        for part in parts:
            self._see_pulse(part, tick)
            if max(part.silent_s, part.stalled_s) > (bound_s := _bound_s(part)):
                self._kill(
                    part.name, part.actor, f"it {_trouble(part)} (bound {bound_s:.0f} s)", restarts=part.restarts
                )
                part.beat, part.pulse, part.silent_s, part.stalled_s = None, None, 0.0, 0.0
        if any(part.restarts and part.silent_s >= LATE_AFTER_S for part in parts):
            # Whoever waits for one of these is not to blame.
            return
        for call in calls:
            call.waited_s += tick
            if call.waited_s > (bound_s := call.patience.bound_s):
                self._kill(
                    call.part, call.actor, f"its {call.what} has taken {call.waited_s:.0f} s (bound {bound_s:.0f} s)"
                )
                call.waited_s = 0.0

    def _see_pulse(self, part: _Part, tick: float) -> None:
        if part.beat is None:
            part.rested_s += tick
            if part.rested_s < BEAT_EVERY_S:
                return
            part.beat = part.actor.heartbeat.remote()
        done, _ = ray.wait([part.beat], timeout=0)
        if not done:
            part.silent_s += tick
            return
        took_s, since_s = part.silent_s, part.silent_s + part.rested_s
        beat, part.beat, part.silent_s, part.rested_s = part.beat, None, 0.0, 0.0
        try:
            pulse = ray.get(beat)
        except ray.exceptions.ActorUnavailableError:
            # It may live and take no calls any more. It is asked again at once, and has been silent all the time.
            part.silent_s, part.rested_s = took_s + tick, BEAT_EVERY_S
            return
        except ray.exceptions.RayError:
            # It died, or its engine did and it ends itself: others see to that.
            part.pulse, part.stalled_s = None, 0.0
            return
        if part.pulse is not None:
            part.patience.observe(took_s)
        goes_on = part.pulse is None or not pulse.num_open or not part.pulse.num_open or pulse.done != part.pulse.done
        part.stalled_s = 0.0 if goes_on else part.stalled_s + since_s
        part.pulse = pulse

    def _see_restarts(self, part: _Part) -> None:
        """Tell and count the deaths after which Ray started an actor again."""
        if not part.restarts:
            return
        with self._lock:
            num = num_restarts(part.actor) - part.num_restarts
            part.num_restarts += max(0, num)
        if num <= 0:
            return
        part.beat, part.pulse, part.silent_s, part.stalled_s = None, None, 0.0, 0.0
        reason = self.why(part.name) or "its process ended; see the actors' logs"
        self._note(f"the {part.name} died{f' {num} times' if num > 1 else ''} and was started again ({reason})")
        try:
            for _ in range(num):
                self.deaths.add(Death(part=part.name, reason=reason))
        except CrashLoopError:
            # Whoever waits for it learns that it is dead, and from `Deaths.check` why.
            kill(part.actor)
            self.leave(part.name)

    def _kill(self, name: str, actor: object, reason: str, *, restarts: bool = False) -> None:
        self._note(f"the {name} hangs: {reason}; it is killed")
        self._killed[name] = f"it hung: {reason}"
        kill(actor, no_restart=not restarts)


def _bound_s(part: _Part) -> float:
    return part.patience.bound_s if part.pulse is not None else part.start_s


def _trouble(part: _Part) -> str:
    if part.stalled_s > part.silent_s:
        return f"has computed nothing for {part.stalled_s:.0f} s, though something is open"
    return f"has not {'answered' if part.pulse else 'come up'} for {part.silent_s:.0f} s"
