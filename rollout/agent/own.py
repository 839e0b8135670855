"""An agent of one's own: a function or a program that speaks to the worker's endpoint. One call, one trajectory."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from configs.own import OwnCodeError, failure, own_function
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
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

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
    """The agent gave no answer; the message says why. The attempt is unscored, not wrong."""


class Solving(Protocol):
    """A function or a program, ready to be asked."""

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        """Raises AgentError."""
        ...


class FunctionSolving:
    """Calls an `async def solve(task, client) -> str`."""

    def __init__(self, config: FunctionAgentConfig) -> None:
        """Raises OwnCodeError."""
        self._function: Callable[..., Awaitable[str]] = load_agent(config)
        self._name = config.function
        self._pool: tuple[str, DefaultAsyncHttpxClient] | None = None

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        client = self._client(endpoint, attempt)
        try:
            answer: object = await self._function(task, client)
        except Exception as error:
            raise AgentError(f"agent.function: '{self._name}' failed with {failure(error)}") from error
        if not isinstance(answer, str):
            raise AgentError(
                f"agent.function: '{self._name}' returned {type(answer).__name__}, not a text; return '' where it has "
                "no answer"
            )
        return answer

    def _client(self, endpoint: Endpoint, attempt: Attempt) -> "AsyncOpenAI":
        """All attempts share connections. No proxy stands before an endpoint on loopback."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        if self._pool is None or self._pool[0] != endpoint.base_url:
            self._pool = endpoint.base_url, DefaultAsyncHttpxClient(trust_env=False)
        return AsyncOpenAI(base_url=endpoint.base_url, api_key=attempt.key, http_client=self._pool[1])


class CommandSolving:
    """Starts a program for each attempt."""

    def __init__(self, program: Program, model: str) -> None:
        self._program = program
        self._model = model

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        door = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": attempt.key, "OPENAI_MODEL": self._model}
        try:
            printed = await self._program.run(asdict(task), door, mark=attempt.key)
        except ProgramError as error:
            raise AgentError(str(error)) from None
        if attempt.posted is not None:
            return attempt.posted
        if not printed:
            raise AgentError("the agent printed nothing and posted no answer")
        return printed


class OwnAgent:
    """Gives each attempt a key, runs the agent with it, and makes a trajectory of its calls."""

    def __init__(
        self,
        solving: Solving,
        endpoint: Endpoint,
        *,
        writer: Callable[[Task, str], Writer],
        chat: ChatFormat,
        rules: Rules,
        timeout_s: float,
    ) -> None:
        """`writer` gives each attempt, by its task and its trajectory's id, whoever replies in it."""
        self._solving = solving
        self._endpoint = endpoint
        self._writer = writer
        self._chat = chat
        self._rules = rules
        self._timeout_s = timeout_s

    async def run(
        self, task: Task, *, trajectory_id: str, group_id: str, on_turn: TurnListener | None = None, hints: str = ""
    ) -> Trajectory:
        """One attempt to its end. An agent that fails, or is not done in time, leaves it unscored."""
        attempt = Attempt(self._writer(task, trajectory_id), self._chat, self._rules)
        await self._endpoint.admit(attempt)
        answer, wrong = None, None
        try:
            answer = await self._in_time(task, attempt)
        except AgentError as error:
            wrong = str(error)
        finally:
            self._endpoint.dismiss(attempt)
            turns = await attempt.end()
        if on_turn:
            for turn in turns:
                on_turn(turn)
        in_context = wrong is None or not attempt.out_of_context
        wrong = attempt.broken or (wrong if in_context else None)
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
            stop_reason="infrastructure" if wrong else "answered" if in_context else "context",
            failure=wrong,
        )

    async def _in_time(self, task: Task, attempt: Attempt) -> str:
        """Raises AgentError. Whatever the agent does about its cancellation, this ends."""
        given = GivenTask(id=task.id, dataset=task.dataset, question=task.question)
        solving = asyncio.ensure_future(self._solving.answer(given, attempt, self._endpoint))
        try:
            done, _ = await asyncio.wait((solving,), timeout=self._timeout_s)
        finally:
            solving.cancel()
            await asyncio.wait((solving,), timeout=GRACE_S)
        if not done:
            raise AgentError(f"the agent took longer than rollout.episode_timeout_s = {self._timeout_s:g}")
        return solving.result()


def load_agent(config: FunctionAgentConfig) -> Callable[..., Awaitable[str]]:
    """Raises OwnCodeError."""
    function = own_function(config.function, key="agent.function", takes="task, client")
    if not inspect.iscoroutinefunction(function):
        raise OwnCodeError(f"agent.function: '{config.function}' is no async function; write `async def`")
    return function


def build_solving(config: AgentConfig, code_path: str | None) -> Solving:
    """Raises OwnCodeError and ProgramError."""
    assert not isinstance(config, PlannerAgentConfig)
    if isinstance(config, CommandAgentConfig):
        return CommandSolving(Program(config.command, code_path), config.model)
    return FunctionSolving(config)


def build_own_agent(
    config: RunConfig, solving: Solving, endpoint: Endpoint, *, writer: Callable[[Task, str], Writer], chat: ChatFormat
) -> OwnAgent:
    """The agent that a run's configuration names, with `writer` to reply in each of its attempts."""
    return OwnAgent(
        solving,
        endpoint,
        writer=writer,
        chat=chat,
        rules=rules_of(config),
        timeout_s=config.rollout.episode_timeout_s,
    )


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
