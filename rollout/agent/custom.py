"""A custom agent: a function or a program that calls the worker's endpoint. Each run gives one trajectory."""

import asyncio
import inspect
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from configs.api_keys import without_secrets
from configs.errors import UserError
from configs.plugins import failure, in_a_thread, own_function
from configs.rollout import AgentConfig, CommandAgentConfig, FunctionAgentConfig, PlannerAgentConfig
from configs.run import RunConfig
from envs.types import Task
from rollout.agent.agent import TurnListener
from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt, Bound
from rollout.endpoint.request import Rules
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import Writer
from rollout.engines.engine import TimeLimit
from rollout.types import Trajectory

GRACE_S = 5.0
"""Time that a cancelled function has to end."""
INHERITED = ("LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Variables of the worker that a program inherits besides PATH. None of them is a secret."""
MAX_ERROR_CHARS = 300
ENDING_S = 5.0
_INTERPRETER = re.compile(r"python[0-9.]*|bash|sh|node|ruby|perl")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTask:
    """The part of a task that an agent may see: not its answer, nor its other data."""

    id: str
    dataset: str
    question: str


class AgentError(RuntimeError):
    """An agent that gave no answer.

    The attempt is unscored, unless `bound` names what the policy used up.
    """

    def __init__(self, message: str, *, bound: Bound | None = None) -> None:
        super().__init__(message)
        self.bound = bound


Solve = Callable[[GivenTask, Attempt, Endpoint], Awaitable[str]]
"""Solves a task. Raises AgentError."""


def function_solving(config: FunctionAgentConfig) -> Solve:
    """Load an `async def solve(task, client) -> str`, or a plain function that is called in a thread.

    Raises OwnCodeError.
    """
    function = own_function(config.function, key="agent.function", takes="task, client")

    async def called(task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> object:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

        # On loopback there is no proxy, and without TLS no certificates, which take long to load.
        url, key = endpoint.base_url, attempt.key
        if inspect.iscoroutinefunction(function):
            async_http = DefaultAsyncHttpxClient(trust_env=False, verify=False)
            async with AsyncOpenAI(base_url=url, api_key=key, http_client=async_http) as async_client:
                return await function(task, async_client)
        http = DefaultHttpxClient(trust_env=False, verify=False)
        with OpenAI(base_url=url, api_key=key, http_client=http) as client:
            return await in_a_thread(function, task, client)

    async def solve(task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        try:
            answer = await called(task, attempt, endpoint)
        except (Exception, SystemExit) as error:
            # The error that the client raised may be the cause of the agent's own error.
            chain = "".join(traceback.format_exception(error))
            bound = attempt.used_up if attempt.refusal and attempt.refusal in chain else None
            raise AgentError(f"agent.function: {config.function} failed with {failure(error)}", bound=bound) from error
        if not isinstance(answer, str):
            if inspect.iscoroutine(answer):
                answer.close()
            raise AgentError(
                f"agent.function: {config.function} returned a {type(answer).__name__}, not a text; return '' for no "
                "answer, and write `async def` around an async function"
            )
        return answer

    return solve


class Program:
    """A command that acts for one attempt: a process in a temporary folder, of which nothing remains.

    Its words that name files beside the recipe or in the current folder become absolute paths.
    """

    def __init__(self, command: str, code_path: str | None) -> None:
        """Find the program. Raises UserError."""
        try:
            arguments = shlex.split(command)
        except ValueError as error:
            raise UserError(f"agent.command: '{command}' cannot be parsed: {error}") from None
        places = [*([Path(code_path)] if code_path else []), Path.cwd()]
        self._words = [
            next((str((place / word).absolute()) for place in places if (place / word).is_file()), word)
            for word in arguments
        ]
        self.files = tuple(Path(word) for word in self._words if Path(word).is_file())
        self._path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        if not arguments or shutil.which(self._words[0], path=self._path) is None:
            raise UserError(
                f"agent.command: '{command}' starts with no program that can be executed; name the interpreter of a "
                "script, as in `python agent.py`, or run `chmod +x` on it"
            )
        script = self._words[1] if len(arguments) > 1 and _INTERPRETER.fullmatch(Path(arguments[0]).name) else "-"
        if not script.startswith("-") and not Path(script).is_absolute():
            raise UserError(
                f"agent.command: the file '{script}' is neither beside the recipe nor in the current folder"
            )

    async def run(self, task: Mapping[str, object], variables: Mapping[str, str], *, mark: str) -> str:
        """Run the program with `task` as JSON on its input, and return the last line that it prints.

        Its environment holds `variables` and what is in INHERITED. At the end its process group is killed, and every
        process that has `mark` in its environment. Raises UserError.
        """
        with tempfile.TemporaryDirectory(prefix="agentflow-attempt-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            work = folder / "work"
            work.mkdir()
            (folder / "task").write_text(json.dumps(dict(task)))
            inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
            environment = {**inherited, "PATH": self._path, "HOME": str(work), "TMPDIR": str(work), **variables}
            with (
                (folder / "task").open("rb") as stdin,
                (folder / "out").open("wb") as out,
                (folder / "err").open("wb") as err,
            ):
                process = await asyncio.create_subprocess_exec(
                    *self._words,
                    stdin=stdin,
                    stdout=out,
                    stderr=err,
                    cwd=work,
                    env=environment,
                    start_new_session=True,
                )
            try:
                status = await process.wait()
            finally:
                await asyncio.shield(asyncio.to_thread(end_all, process.pid, mark))
            if status != 0:
                line = without_secrets(_last_line(folder / "err"))[:MAX_ERROR_CHARS]
                ending = f"ended with exit status {status}" if status > 0 else f"was ended by signal {-status}"
                raise UserError(f"the agent {ending}{line and f': {line}'}")
            return _last_line(folder / "out")


def end_all(group: int, mark: str) -> None:
    """Kill a process group, and every process with `mark` in its environment.

    A daemon leaves its process group but keeps its environment.
    """
    deadline = time.monotonic() + ENDING_S
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    while time.monotonic() < deadline and (marked := [*filter(lambda one: _has(one, mark), psutil.process_iter())]):
        for process in marked:
            # psutil makes sure that the number still belongs to this process.
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def _has(process: psutil.Process, mark: str) -> bool:
    # A process that has ended, or belongs to another user, cannot be read.
    try:
        return mark in str(process.environ())
    except (psutil.Error, OSError):
        return False


def _last_line(path: Path) -> str:
    """Return the last line of a file that is not blank."""
    last = b""
    with path.open("rb") as file:
        # Line by line, since a program may print more than fits into memory.
        for line in file:
            last = line if line.strip() else last
    # Texts have more line separators than bytes; a progress bar ends its lines by a carriage return.
    lines = [text for line in last.splitlines() if (text := line.decode(errors="replace").strip())]
    return lines[-1] if lines else ""


def command_solving(program: Program, model: str) -> Solve:
    """Return what starts a program for each attempt, and ends it once it has posted its answer."""

    async def solve(task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        variables = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": attempt.key,
            "OPENAI_MODEL": model,
            # Anthropic's clients add the version to the path themselves.
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": attempt.key,
        }
        running = asyncio.ensure_future(program.run(asdict(task), variables, mark=attempt.key))
        try:
            await asyncio.wait((running, attempt.posted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            await asyncio.wait((running,))
        printed, wrong = "", "the agent printed nothing and posted no answer"
        try:
            printed = "" if running.cancelled() else running.result()
        except UserError as error:
            wrong = str(error)
        except OSError as error:
            wrong = f"the agent could not be started: {error.strerror or error}"
        if attempt.posted.done():
            return attempt.posted.result()
        if not printed:
            # A program's output does not show reliably why it failed.
            raise AgentError(wrong, bound=attempt.used_up)
        return printed

    return solve


@dataclass(frozen=True, slots=True)
class CustomAgent:
    """Runs a custom agent with a key of the endpoint, and records its model calls as a trajectory."""

    solve: Solve
    endpoint: Endpoint
    writer: Callable[[Task, str], Writer]
    """Creates the writer of an attempt's replies from its task and its trajectory's id."""
    chat: ChatFormat
    rules: Rules
    timeout_s: float
    wall_timeout_s: float = math.inf

    async def run(
        self, task: Task, *, trajectory_id: str, group_id: str, on_turn: TurnListener | None = None, hints: str = ""
    ) -> Trajectory:
        """Run one attempt. An agent that fails or exceeds the time limit leaves it unscored."""
        limit = TimeLimit(self.timeout_s, self.wall_timeout_s)
        attempt = Attempt(self.writer(task, trajectory_id), self.chat, self.rules, limit)
        await self.endpoint.admit(attempt)
        answer, wrong, bound = None, None, None
        try:
            answer = await self._in_time(task, attempt)
        except AgentError as error:
            wrong, bound = str(error), error.bound
        finally:
            self.endpoint.dismiss(attempt)
            turns = await attempt.end()
        if on_turn:
            for turn in turns:
                on_turn(turn)
        wrong = attempt.broken or (None if bound else wrong)
        if wrong is None and answer is not None and not turns:
            wrong = "the agent answered without a model call; is it pointed at OPENAI_BASE_URL?"
        if wrong is not None:
            _log.warning("trajectory %s ends unscored: %s", trajectory_id, wrong)
        return Trajectory(
            id=trajectory_id,
            group_id=group_id,
            task=task,
            turns=tuple(turns),
            answer=None if wrong else answer,
            stop_reason="infrastructure" if wrong else bound or "answered",
            failure=wrong,
        )

    async def _in_time(self, task: Task, attempt: Attempt) -> str:
        """Return the answer. Ends in time even if the agent ignores its cancellation. Raises AgentError."""
        visible = GivenTask(id=task.id, dataset=task.dataset, question=task.question)
        solving = asyncio.ensure_future(self.solve(visible, attempt, self.endpoint))
        try:
            async with attempt.limit.running():
                await asyncio.wait((solving, attempt.out_of_calls), return_when=asyncio.FIRST_COMPLETED)
                # An agent that is refused a further call may still answer.
                _, late = await asyncio.wait((solving,), timeout=GRACE_S)
        except TimeoutError:
            exceeded = f"rollout.episode_timeout_s = {self.timeout_s:g}"
            if attempt.limit.is_wall_over:
                exceeded = f"rollout.wall_timeout_s = {self.wall_timeout_s:g}"
            raise AgentError(f"the agent took longer than {exceeded}") from None
        finally:
            solving.cancel()
            await asyncio.wait((solving,), timeout=GRACE_S)
            # Retrieve the error of an agent that ended too late, which asyncio would otherwise log.
            solving.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        if late:
            raise AgentError(attempt.refusal or "the agent was refused a further call", bound="calls")
        if solving.cancelled():
            # The agent cancelled itself; a cancellation from outside leaves this function above.
            raise AgentError("the agent was cancelled by something that it waited for")
        return solving.result()


def build_solving(config: AgentConfig, code_path: str | None) -> Solve:
    """Load a custom agent. Raises UserError."""
    assert not isinstance(config, PlannerAgentConfig)
    if isinstance(config, CommandAgentConfig):
        return command_solving(Program(config.command, code_path), config.model)
    return function_solving(config)


def rules_of(config: RunConfig) -> Rules:
    """Return the limits of the requests of a run's attempts."""
    agent, rollout = config.agent, config.rollout
    assert not isinstance(agent, PlannerAgentConfig)
    return Rules(
        model=agent.model,
        temperature=rollout.temperature,
        override=agent.sampling == "override",
        max_tokens=rollout.max_turn_tokens,
        max_context_tokens=rollout.engine.max_model_len,
        max_calls=rollout.max_calls,
    )
