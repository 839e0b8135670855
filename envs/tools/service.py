"""How a service outside is asked: at an even pace, again after a passing failure, within a time limit."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from envs.types import ToolUnavailableError

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLimits:
    """The bounds of one call. The time limit covers all attempts and the pauses between them.

    `requests_per_minute` holds for all calls of one process, `max_bytes` for one answer after decompression.
    """

    max_attempts: int = 4
    attempt_limit_s: float = 10.0
    time_limit_s: float = 30.0
    first_pause_s: float = 0.5
    requests_per_minute: float = 60.0
    max_bytes: int = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An attempt without an answer. `reason` holds no word of the server's, for it may quote a key.

    `passing`: the same request may succeed later, after `wait_s` at the soonest. `bad_query`: the service takes the
    query for a wrong one.
    """

    reason: str
    passing: bool = False
    wait_s: float = 0.0
    bad_query: bool = False


class QueryRefusedError(ValueError):
    """The service takes this query for a wrong one: the caller's doing."""


class Pace:
    """An even row of starts for all calls of one process."""

    def __init__(self, per_minute: float) -> None:
        self._apart_s = 60 / per_minute
        self._next_start = 0.0

    async def turn(self) -> None:
        """Waits for this caller's start."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + self._apart_s
        if start > now:
            await asyncio.sleep(start - now)


class Service:
    """One service. `name` stands in its errors."""

    def __init__(self, name: str, limits: ServiceLimits) -> None:
        self.limits = limits
        self._name = name
        self._pace = Pace(limits.requests_per_minute)

    async def ask(self, attempt: Callable[[], Awaitable[Answer | Failure]]) -> Answer:
        """What the first attempt with an answer gives. Raises ToolUnavailableError when none does, and
        QueryRefusedError when it is the query's fault."""
        await self._pace.turn()
        try:
            async with asyncio.timeout(self.limits.time_limit_s):
                outcome = await self._attempts(attempt)
        except TimeoutError:
            outcome = Failure(reason=f"gave no answer within {self.limits.time_limit_s} s")
        # Raised here and not in an `except`: a client's error may hold the key, and would stay attached to this one.
        if isinstance(outcome, Failure):
            if outcome.bad_query:
                raise QueryRefusedError(outcome.reason)
            raise ToolUnavailableError(f"{self._name} {outcome.reason}")
        return outcome

    async def _attempts(self, attempt: Callable[[], Awaitable[Answer | Failure]]) -> Answer | Failure:
        pause_s, reason = self.limits.first_pause_s, ""
        for number in range(1, self.limits.max_attempts + 1):
            outcome = await attempt()
            if not isinstance(outcome, Failure):
                return outcome
            if outcome.bad_query:
                return outcome
            if not outcome.passing:
                return Failure(reason=f"failed with {outcome.reason}")
            reason = outcome.reason
            if number < self.limits.max_attempts:
                # Jitter keeps many workers that were refused together from coming back together.
                await asyncio.sleep(max(pause_s * random.uniform(1, 1.5), outcome.wait_s))
                pause_s *= 2
                await self._pace.turn()
        return Failure(reason=f"failed {self.limits.max_attempts} times, at last with {reason}")
