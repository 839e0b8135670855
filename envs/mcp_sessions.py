"""The sessions of a tool server: so many at a time, shared fairly among its clients."""

import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from envs.tools.toolbox import Toolbox
from envs.types import Tool

MAX_SESSIONS = 64
IDLE_S = 900.0
"""A session that nobody used for so long is closed when room for another one is needed."""


class ServerRefusedError(RuntimeError):
    """The server cannot be started or a session cannot be opened; the message says why and what to do."""


@dataclass(slots=True)
class _Session:
    """Tools of one session, which `owner` opened; `num_calls` are in the middle of being answered."""

    tools: dict[str, Tool]
    episode: AbstractContextManager[list[Tool]]
    owner: str
    last_used: float = field(default_factory=time.monotonic)
    num_calls: int = 0


class Sessions:
    """The open sessions by their id, at most `max_sessions`.

    One client may have them all while it is alone. When there is no room, the client with the most gives up the session
    that it has not used for longest, to one that would still have fewer; a session in the middle of a call stays.
    """

    def __init__(self, toolbox: Toolbox, *, max_sessions: int = MAX_SESSIONS, idle_s: float = IDLE_S) -> None:
        self._toolbox = toolbox
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._open: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session_id: str, *, owner: str = "") -> None:
        """Raises ServerRefusedError when all places are taken, and none by a client that must give one up."""
        self._close_idle()
        if len(self._open) >= self._max_sessions and not self._close_of_greediest(owner):
            raise ServerRefusedError(
                f"all {self._max_sessions} sessions are in use; close one, or wait {self._idle_s:.0f} s of idleness"
            )
        episode = self._toolbox.episode()
        self._open[session_id] = _Session({tool.name: tool for tool in episode.__enter__()}, episode, owner)

    def close(self, session_id: str) -> bool:
        """End a session and whatever runs in it; False where there is none of this id."""
        session = self._open.pop(session_id, None)
        if session is not None:
            session.episode.__exit__(None, None, None)
        return session is not None

    def close_all(self) -> None:
        for session_id in list(self._open):
            self.close(session_id)

    def holds(self, session_id: str) -> bool:
        return session_id in self._open

    @contextmanager
    def lent(self, session_id: str | None, *, owner: str = "") -> Iterator[dict[str, Tool]]:
        """The tools of a session, which is opened for `owner` where it is new; None: of one that ends with this call,
        and counts for nobody. While they are lent the session is not idle. Raises ServerRefusedError as `open` does."""
        if session_id is None:
            session_id = secrets.token_hex(16)
            try:
                with self.lent(session_id, owner=session_id) as tools:
                    yield tools
            finally:
                self.close(session_id)
            return
        if session_id not in self._open:
            self.open(session_id, owner=owner)
        session = self._open[session_id]
        session.num_calls += 1
        try:
            yield session.tools
        finally:
            session.num_calls -= 1
            session.last_used = time.monotonic()

    def _close_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        for session_id, session in list(self._open.items()):
            if session.num_calls == 0 and session.last_used < oldest:
                self.close(session_id)

    def _close_of_greediest(self, newcomer: str) -> bool:
        """Make room at the cost of the client with the most sessions; False where `newcomer` would have as many."""
        num_of = Counter(session.owner for session in self._open.values())
        greedy = {owner for owner, num in num_of.items() if num > num_of[newcomer] + 1}
        at_rest = [
            (-num_of[session.owner], session.last_used, session_id)
            for session_id, session in self._open.items()
            if session.owner in greedy and session.num_calls == 0
        ]
        return bool(at_rest) and self.close(min(at_rest)[2])
