"""An agent of one's own: a function or a program that speaks to the worker's endpoint. One call, one trajectory."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from configs.plugins import failure, in_a_thread, own_function
from configs.rollout import AgentConfig, CommandAgentConfig, FunctionAgentConfig, PlannerAgentConfig
from configs.run import RunConfig
from envs.types import Task
from rollout.agent.agent import TurnListener
from rollout.agent.program import Program, ProgramError
from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt
from rollout.endpoint.request import Rules
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import Writer
from rollout.types import Trajectory

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

Clients: TypeAlias = "Callable[[str], AsyncOpenAI | OpenAI]"
GRACE_S = 5.0
"""That a function whose time is over has to end."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTask:
    """What an agent is told of a task. Not the answer, nor what a scorer may read besides."""

    id: str
    dataset: str
    question: str


class AgentError(RuntimeError):
    """The agent gave no answer; the message says why. The attempt is unscored, not wrong, but where the agent failed
    `over_context`: its messages had filled the context, which is the policy's doing."""

    def __init__(self, message: str, *, over_context: bool = False) -> None:
        super().__init__(message)
        self.over_context = over_context


class Solving(Protocol):
    """A function or a program, ready to be asked."""

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        """Raises AgentError."""
        ...


class FunctionSolving:
    """Calls an `async def solve(task, client) -> str`, or a plain function, which has a thread to itself."""

    def __init__(self, config: FunctionAgentConfig) -> None:
        """Raises OwnCodeError."""
        self._function = own_function(config.function, key="agent.function", takes="task, client")
        self._is_async = inspect.iscoroutinefunction(self._function)
        self._name = config.function
        self._clients: tuple[str, Clients] | None = None

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        if self._clients is None or self._clients[0] != endpoint.base_url:
            self._clients = endpoint.base_url, _clients(endpoint.base_url, is_async=self._is_async)
        client = self._clients[1](attempt.key)
        try:
            given = self._function(task, client) if self._is_async else in_a_thread(self._function, task, client)
            answer = await given
        except (Exception, SystemExit) as error:
            raise AgentError(
                f"agent.function: '{self._name}' failed with {failure(error)}",
                over_context=attempt.out_of_context is not None and _tells(error, attempt.out_of_context),
            ) from error
        if inspect.iscoroutine(answer):
            answer.close()
            raise AgentError(
                f"agent.function: '{self._name}' is a plain function that returned a coroutine, and got the client of "
                "one; write `async def` around an async function"
            )
        if not isinstance(answer, str):
            raise AgentError(
                f"agent.function: '{self._name}' returned {type(answer).__name__}, not a text; return '' where it has "
                "no answer"
            )
        return answer


def _tells(error: BaseException | None, words: str) -> bool:
    """Whether the error, or one that it came of, has these words in it."""
    seen = list[BaseException]()
    while error is not None and error not in seen:
        if words in str(error):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


def _clients(base_url: str, *, is_async: bool) -> Clients:
    """Clients by their keys, which share connections: an agent that closes its client closes nobody else's. No proxy
    stands before an endpoint on loopback."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

    class Shared(DefaultAsyncHttpxClient):
        async def aclose(self) -> None:
            pass

    class SharedByThreads(DefaultHttpxClient):
        def close(self) -> None:
            pass

    if is_async:
        shared = Shared(trust_env=False)
        return lambda key: AsyncOpenAI(base_url=base_url, api_key=key, http_client=shared)
    waiting = SharedByThreads(trust_env=False)
    return lambda key: OpenAI(base_url=base_url, api_key=key, http_client=waiting)


@dataclass(frozen=True, slots=True)
class CommandSolving:
    """Starts a program for each attempt. One that has posted its answer is not waited for."""

    program: Program
    model: str

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        door = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": attempt.key,
            "OPENAI_MODEL": self.model,
            # Anthropic's clients add the version to the path themselves.
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": attempt.key,
        }
        wrong = "the agent printed nothing and posted no answer"
        try:
            printed = await _until(attempt.answered, self.program.run(asdict(task), door, mark=attempt.key))
        except ProgramError as error:
            printed, wrong = None, str(error)
        except OSError as error:
            printed, wrong = None, f"the agent could not be started: {error.strerror or error}"
        if attempt.posted is not None:
            return attempt.posted
        if not printed:
            # What a program failed over, only its own words could tell.
            raise AgentError(wrong, over_context=attempt.out_of_context is not None)
        return printed


async def _until(event: asyncio.Event, work: Coroutine[Any, Any, str]) -> str | None:
    """What `work` returns. None where `event` is set before: `work` is cancelled then, and has ended."""
    running, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.cancel()
        waiting.cancel()
        await asyncio.wait((running, waiting))
    return None if running.cancelled() else running.result()


@dataclass(frozen=True, slots=True)
class OwnAgent:
    """Gives each attempt a key, runs the agent with it, and makes a trajectory of its calls. `writer`: by its task and
    its trajectory's id, whoever replies in an attempt."""

    solving: Solving
    endpoint: Endpoint
    writer: Callable[[Task, str], Writer]
    chat: ChatFormat
    rules: Rules
    timeout_s: float

    async def run(
        self, task: Task, *, trajectory_id: str, group_id: str, on_turn: TurnListener | None = None, hints: str = ""
    ) -> Trajectory:
        """One attempt to its end. An agent that fails, or is not done in time, leaves it unscored."""
        attempt = Attempt(self.writer(task, trajectory_id), self.chat, self.rules, timeout_s=self.timeout_s)
        await self.endpoint.admit(attempt)
        answer, wrong, over_context = None, None, False
        try:
            answer = await self._in_time(task, attempt)
        except AgentError as error:
            wrong, over_context = str(error), error.over_context
        finally:
            self.endpoint.dismiss(attempt)
            turns = await attempt.end()
        if on_turn:
            for turn in turns:
                on_turn(turn)
        wrong = attempt.broken or (None if over_context else wrong)
        if wrong is None and answer is not None and not turns:
            wrong = "the agent answered without a call that the endpoint took; is it pointed at OPENAI_BASE_URL?"
        if wrong is not None:
            _log.warning("trajectory %s ends unscored: %s", trajectory_id, wrong)
        return Trajectory(
            id=trajectory_id,
            group_id=group_id,
            task=task,
            turns=tuple(turns),
            answer=None if wrong else answer,
            stop_reason="infrastructure" if wrong else "context" if over_context else "answered",
            failure=wrong,
        )

    async def _in_time(self, task: Task, attempt: Attempt) -> str:
        """Raises AgentError. Whatever the agent does about its cancellation, this ends."""
        given = GivenTask(id=task.id, dataset=task.dataset, question=task.question)
        solving = asyncio.ensure_future(self.solving.answer(given, attempt, self.endpoint))
        try:
            async with attempt.limit:
                await asyncio.wait((solving,))
        except TimeoutError:
            raise AgentError(f"the agent took longer than rollout.episode_timeout_s = {self.timeout_s:g}") from None
        finally:
            solving.cancel()
            await asyncio.wait((solving,), timeout=GRACE_S)
        if solving.cancelled():
            # By itself: whoever ends the attempt from outside does not come here.
            raise AgentError("the agent was cancelled by something that it waited for")
        return solving.result()


def build_solving(config: AgentConfig, code_path: str | None) -> Solving:
    """Raises OwnCodeError and ProgramError."""
    assert not isinstance(config, PlannerAgentConfig)
    if isinstance(config, CommandAgentConfig):
        return CommandSolving(Program(config.command, code_path), config.model)
    return FunctionSolving(config)


def rules_of(config: RunConfig) -> Rules:
    """What attempts of this run may ask."""
    agent, rollout = config.agent, config.rollout
    assert not isinstance(agent, PlannerAgentConfig)
    return Rules(
        model=agent.model,
        temperature=rollout.temperature,
        override=agent.sampling == "override",
        max_tokens=rollout.max_turn_tokens,
        max_context_tokens=rollout.engine.max_model_len,
    )
