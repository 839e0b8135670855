"""The memory that episodes hold between their steps, and which of them must give it up."""

import os
import threading
from typing import Protocol
from weakref import WeakKeyDictionary

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Evictable(Protocol):
    """An episode, as far as its memory goes."""

    closed: bool

    def evict(self) -> None:
        """Give up the process, unless a step runs in it."""


class IdleMemory:
    """Keeps the sum over all episodes that wait for their next step at or below `max_bytes`: the largest go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        # Weak: an episode that nobody holds any more ends by itself.
        self._held: WeakKeyDictionary[Evictable, int] = WeakKeyDictionary()

    def rest(self, episode: Evictable, num_bytes: int) -> None:
        """The episode's step has ended; its process is stopped and holds so much."""
        with self._lock:
            if not episode.closed:
                self._held[episode] = num_bytes
        while (largest := self._one_too_many()) is not None:
            largest.evict()

    def wake(self, episode: Evictable) -> None:
        """A step of it begins, or it is closed."""
        with self._lock:
            self._held.pop(episode, None)

    def _one_too_many(self) -> Evictable | None:
        with self._lock:
            held = dict(self._held)
            if sum(held.values()) <= self._max_bytes:
                return None
            largest = max(held, key=held.__getitem__)
            del self._held[largest]
            return largest


def resident_bytes(pid: int) -> int:
    """Physical memory of a process, what it shares included; 0 where the process is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0
