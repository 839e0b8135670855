"""What an engine is: requests in, completions out, adapters by version, and a pulse that shows it works; and how other
threads hand work to the one that owns it."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from configs.errors import UserError
from rollout.engines.read_back import ReadBack
from rollout.types import Completion, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """`done`: how much it has computed so far, in whatever unit (an engine: tokens). `num_open`: what it was asked for
    and has not finished. While something is open, `done` must grow."""

    done: int = 0
    num_open: int = 0


BASE_VERSION = -1
"""The policy version of the untouched base model."""


class EngineError(RuntimeError):
    """The engine cannot serve any more; the trajectory that met it is unscorable, not wrong."""


class ContextFullError(EngineError):
    """The dialogue does not fit the context of the server's model any more."""


class BackendError(UserError):
    """A server that cannot be used as it is set up; the message says what is wrong and what to do. No other request
    would fare better, so it ends the command instead of a trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One model call of a trajectory.

    The prompt stands here twice: as token ids, for an engine that samples itself, and as `messages`, for a server that
    renders and tokenises them. The form of the reply likewise: `grammar` is EBNF source, `json_schema` says the same in
    a server's words. `use_adapter` False asks the frozen base; without a `seed` the sampling continues the engine's
    own random stream. A reply ends with the first of the texts in `stop`: its ids with the token that completes it, its
    text before it.
    """

    trajectory_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    grammar: str | None = None
    use_adapter: bool = True
    seed: int | None = None
    stop: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    json_schema: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """busy_s: seconds spent computing so far. kv_usage: share of the KV cache in use. num_waiting: requests that wait
    for a place. num_preemptions: requests thrown out of the cache so far, for want of room. computed_tokens: of prompts
    and completions so far; repeated_tokens: those among them that begin a trajectory's next turn and were computed in
    the one before, but are in the cache no more."""

    busy_s: float
    kv_usage: float
    num_waiting: int
    num_preemptions: int
    computed_tokens: int
    repeated_tokens: int


class Engine(Protocol):
    """What an agent asks."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion. Raises EngineError when the engine is gone."""
        ...

    def release(self, trajectory_id: str) -> None:
        """This trajectory asks nothing more; what it still has open is dropped."""
        ...


class PolicyEngine(Engine, Protocol):
    """An engine that follows the policy in training."""

    @property
    def policy_version(self) -> int: ...

    async def prepare_adapter(self, version: int, adapter: bytes) -> Any:
        """All of a load that needs no pause of the sampling. Raises ValueError for bytes that cannot be loaded."""
        ...

    async def load_prepared(self, prepared: Any) -> str:
        """Sample with this adapter from now on; return the digest of the bytes that were loaded."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """The log-prob of every token but the first under the newest weights, at temperature 1. Asked right after
        `load_prepared`, without waiting for it, it is the first thing that is computed with these weights."""
        ...

    async def pulse(self) -> Pulse:
        """Answered by whatever computes, between two steps: the tokens computed so far and the requests that are open.
        No request is added: one more would change the shapes, and with them the last bits, of a synchronous run's
        batches. Raises EngineError when the engine is gone."""
        ...

    async def read_back(self) -> ReadBack:
        """The newest weights as the engine's memory holds them, beside what it was given."""
        ...


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Command:
    """Work, and where its result goes."""

    work: Callable[[], object]
    done: Future[Any]

    def run(self) -> None:
        """A ValueError is a refusal that changed nothing. Anything else may have stopped half-way, and is raised."""
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.work())
        except Exception as error:
            self.done.set_exception(error)
            if not isinstance(error, ValueError):
                raise


class Commands:
    """Work that other threads hand to the one that owns an engine. `submit` is for them, everything else for the one
    that does the work."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._ended: EngineError | None = None
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Raises EngineError once the thread does no more work, so that nobody waits for it in vain."""
        done: Future[Result] = Future()
        command = _Command(work=work, done=done)
        with self._lock:
            if self._ended is not None:
                raise EngineError(str(self._ended)) from self._ended.__cause__
            self._queue.put(command)
        return done

    def run_all(self, *, idle: Callable[[], bool]) -> None:
        """Run what is queued; while there is nothing else to do (`idle`), sleep until something is. Woken by
        `submit`."""
        while True:
            try:
                command = self._queue.get(block=idle())
            except queue.Empty:
                return
            command.run()

    def end(self, error: EngineError) -> None:
        """Take nothing more, and refuse what waits."""
        with self._lock:
            self._ended = error
        while not self._queue.empty():
            waiting = self._queue.get().done
            if waiting.set_running_or_notify_cancel():
                waiting.set_exception(error)
