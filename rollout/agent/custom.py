"""A custom agent: a function or a program that calls the worker's endpoint. Each run gives one trajectory."""

import asyncio
import inspect
import json
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from configs.api_keys import without_secrets
from configs.errors import UserError
from configs.plugins import failure, in_a_thread, own_function
from configs.rollout import CommandAgentConfig, FunctionAgentConfig, PlannerAgentConfig, RolloutConfig
from configs.run import RunConfig
from envs import kernel
from envs.types import Task, ToolUnavailableError
from rollout.agent.agent import TurnListener, stop_of_failure
from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt, Bound
from rollout.endpoint.request import Rules
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import Writer
from rollout.engines.engine import TimeLimit, TimeLimitError
from rollout.files import held_folder, remove_tree
from rollout.guide import Guide
from rollout.types import StopReason, Trajectory, Turn

GRACE_S = 5.0
"""Time that a cancelled function has to end."""
INHERITED = ("LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Variables of the worker that a program inherits besides PATH. None of them is a secret."""
MAX_ERROR_CHARS = 300
ENDING_S = 5.0
"""Time that a worker waits for the end of a program's processes and the deletion of its folder."""
_BOOT = "import sys; sys.path.append(sys.argv[1]); from rollout.agent import keeper; keeper.main()"
_KEEPER = (sys.executable, "-I", "-S", "-c", _BOOT, str(Path(__file__).parents[2]))
_INTERPRETER = re.compile(r"python[0-9.]*|bash|sh|node|ruby|perl")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTask:
    """The part of a task that an agent may see: not its answer, nor its other data."""

    id: str
    dataset: str
    question: str


class AgentError(RuntimeError):
    """An agent that gave no answer because it used up `bound`, or by a `fault` that is not the policy's doing."""

    def __init__(self, message: str, *, bound: Bound | None = None, fault: bool = False) -> None:
        super().__init__(message)
        self.bound = bound
        self.fault = fault


Solve = Callable[[GivenTask, Attempt, Endpoint], Awaitable[str]]
"""Solves a task. Raises AgentError."""


def function_solving(config: FunctionAgentConfig) -> Solve:
    """Load an `async def solve(task, client) -> str`, or a plain function that is called in a thread.

    Raises OwnCodeError.
    """
    function = own_function(config.function, key="agent.function", takes="task, client")

    async def called(task: GivenTask, url: str, key: str) -> object:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI

        # On loopback there is no proxy, and without TLS no certificates, which take long to load.
        if inspect.iscoroutinefunction(function):
            async_http = DefaultAsyncHttpxClient(trust_env=False, verify=False)
            async with AsyncOpenAI(base_url=url, api_key=key, http_client=async_http) as async_client:
                return await function(task, async_client)
        http = DefaultHttpxClient(trust_env=False, verify=False)
        with OpenAI(base_url=url, api_key=key, http_client=http) as client:
            return await in_a_thread(function, task, client)

    async def solve(task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        from openai import APIConnectionError, InternalServerError

        faults = (ToolUnavailableError, APIConnectionError, InternalServerError)
        try:
            answer = await called(task, endpoint.base_url, attempt.key)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            # The error that the client or a tool raised may be the cause of the agent's own error.
            causes = _causes(error)
            refused = [one for one in causes if attempt.refusal and attempt.refusal in str(one)]
            # How long the engine takes is not the policy's doing. Each library has timeouts of its own.
            is_late = attempt.is_sampling and any("Timeout" in type(one).__name__ for one in causes)
            raise AgentError(
                f"agent.function: {config.function} failed with {failure(error)}",
                bound=attempt.used_up if refused else None,
                # One that quotes the refusal is no other fault.
                fault=is_late or any(isinstance(one, faults) and one not in refused for one in causes),
            ) from error
        if not isinstance(answer, str):
            if inspect.iscoroutine(answer):
                answer.close()
            raise AgentError(
                f"agent.function: {config.function} returned a {type(answer).__name__}, not a text; return '' for no "
                "answer, and write `async def` around an async function"
            )
        return answer

    return solve


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error with all that it contains, was raised from, or was raised while handling."""
    causes = [error]
    for one in causes:
        inside = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        causes += [other for other in (one.__cause__, one.__context__, *inside) if other and other not in causes]
    return causes


class Program:
    """A command that acts for one attempt: a process in a temporary folder, of which nothing remains."""

    def __init__(self, command: str, code_path: str | None) -> None:
        """Find the program, and the files beside the recipe or in the current folder. Raises UserError."""
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
            raise UserError(f"agent.command: '{script}' is a file neither beside the recipe nor in the current folder")

    async def run(self, task: Mapping[str, object], variables: Mapping[str, str], *, max_memory_mb: int) -> str:
        """Run the program with `task` as JSON on its input, and return the last line that it prints.

        At the end every process that descends from it is killed. Raises AgentError.
        """
        home, lock = held_folder(Path(tempfile.gettempdir()))
        try:
            with lock:
                work = home / "work"
                work.mkdir()
                inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
                process = await asyncio.create_subprocess_exec(
                    *(*_KEEPER, str(os.getpid()), str(home), str(max_memory_mb), *self._words),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={**inherited, "PATH": self._path, "HOME": str(work), "TMPDIR": str(work), **variables},
                    start_new_session=True,
                )
                try:
                    told, _ = await process.communicate(json.dumps(dict(task)).encode())
                finally:
                    await asyncio.shield(_ended(process))
        finally:
            if home.exists():
                await asyncio.shield(asyncio.to_thread(remove_tree, home))
        return _answer(told)


def _answer(told: bytes) -> str:
    """Return the answer of a program from what its keeper told. Raises AgentError."""
    try:
        end = json.loads(told)
    except ValueError:
        raise AgentError("the processes that keep the program were killed", fault=True) from None
    line = without_secrets(end["err"])[:MAX_ERROR_CHARS]
    status, said = end["status"], line and f": {line}"
    if end["over"]:
        raise AgentError(f"the agent {end['over']}")
    if status:
        ending = f"ended with exit status {status}" if status > 0 else f"was ended by signal {-status}"
        # The system kills where memory is short.
        raise AgentError(f"the agent {ending}{said}", fault=status in (os.EX_TEMPFAIL, -signal.SIGKILL))
    if not end["out"]:
        raise AgentError(f"the agent printed nothing and posted no answer{said}")
    return str(end["out"])


async def _ended(process: asyncio.subprocess.Process) -> None:
    """End a keeper, and wait at most ENDING_S until it has ended the program and deleted its folder."""
    with suppress(ProcessLookupError, TimeoutError):
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), ENDING_S)


def command_solving(config: CommandAgentConfig, code_path: str | None) -> Solve:
    """Return what starts a program for each attempt, and ends it once it has posted its answer. Raises UserError."""
    program = Program(config.command, code_path)
    if kernel.landlock_version() < kernel.SCOPED_VERSION:
        # Programs of this user could read this process's environment, which holds keys.
        kernel.set_dumpable(False)

    async def solve(task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        variables = {
            "OPENAI_BASE_URL": endpoint.base_url,
            "OPENAI_API_KEY": attempt.key,
            "OPENAI_MODEL": config.model,
            # Anthropic's clients add the version to the path themselves.
            "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": attempt.key,
        }
        running = asyncio.ensure_future(program.run(asdict(task), variables, max_memory_mb=config.max_memory_mb))
        try:
            await asyncio.wait((running, attempt.posted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.cancel()
            await asyncio.wait((running,))
        if attempt.posted.done():
            return attempt.posted.result()
        if isinstance(error := running.exception(), AgentError):
            # A program's output does not show reliably why it failed.
            error.bound = attempt.used_up
        return running.result()

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
    limits: RolloutConfig
    guide: Guide | None = None
    """Chooses the replies in one attempt; None takes the first sample."""

    async def run(
        self, task: Task, *, trajectory_id: str, group_id: str, on_turn: TurnListener | None = None, hints: str = ""
    ) -> Trajectory:
        """Run one attempt. One whose agent fails or goes beyond a limit gives no answer; a fault leaves it unscored."""
        attempt: Attempt | None = None
        answer: str | None = None
        failed: AgentError | None = None
        turns: list[Turn] = []
        try:
            limit = TimeLimit(self.limits.episode_timeout_s, self.limits.wall_timeout_s)
            attempt = Attempt(self.writer(task, trajectory_id), self.chat, self.rules, limit, self.guide)
            self.endpoint.admit(attempt)
            try:
                answer = await self._in_time(task, attempt)
            finally:
                self.endpoint.dismiss(attempt)
                turns = await attempt.end()
        except AgentError as error:
            failed = error
        except Exception as error:
            # Whatever it is, it must not end the other attempts of the group.
            failed = AgentError(f"the attempt failed with {failure(error)}", fault=True)
        if on_turn:
            for turn in turns:
                on_turn(turn)
        if attempt and attempt.broken:
            failed = AgentError(attempt.broken, fault=True)
        elif failed is None and not turns:
            failed = AgentError("the agent answered without a model call; is it pointed at OPENAI_BASE_URL?")
        stop: StopReason = "answered"
        wrong: str | None = None
        if failed and failed.bound and turns and not failed.fault:
            stop = failed.bound
        elif failed:
            stop = "infrastructure" if failed.fault else stop_of_failure(turns, self.limits)
            wrong = str(failed)
            _log.warning("trajectory %s ends as %s: %s", trajectory_id, stop, wrong)
        return Trajectory(
            id=trajectory_id,
            group_id=group_id,
            task=task,
            turns=tuple(turns),
            answer=None if failed else answer,
            stop_reason=stop,
            failure=wrong,
        )

    async def _in_time(self, task: Task, attempt: Attempt) -> str:
        """Return the answer. Ends in time even if the agent ignores its cancellation. Raises AgentError."""
        visible = GivenTask(id=task.id, dataset=task.dataset, question=task.question)
        solving = asyncio.ensure_future(self.solve(visible, attempt, self.endpoint))
        try:
            async with attempt.limit.running():
                await asyncio.wait((solving, attempt.out_of_calls), return_when=asyncio.FIRST_COMPLETED)
                # An agent that is refused a further call may still answer, with the replies to its calls before.
                sampled = asyncio.ensure_future(attempt.sampled())
                await asyncio.wait((solving, sampled), return_when=asyncio.FIRST_COMPLETED)
                _, late = await asyncio.wait((solving,), timeout=GRACE_S)
        except TimeLimitError as error:
            raise AgentError(str(error)) from None
        finally:
            solving.cancel()
            await asyncio.wait((solving,), timeout=GRACE_S)
            # Retrieve the error of an agent that ended too late, which asyncio would otherwise log.
            solving.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        if late:
            raise AgentError("the agent was refused a further call", bound="calls")
        if solving.cancelled():
            # The agent cancelled itself; a cancellation from outside leaves this function above.
            raise AgentError("the agent was cancelled by something that it waited for")
        return solving.result()


def build_solving(config: FunctionAgentConfig | CommandAgentConfig, code_path: str | None) -> Solve:
    """Load a custom agent. Raises UserError."""
    if isinstance(config, CommandAgentConfig):
        return command_solving(config, code_path)
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
