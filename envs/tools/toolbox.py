"""The tools of a run: shared parts made once, per-episode tools opened fresh for every task."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from configs.envs import EnvsConfig
from envs.tools.base_generator import AskModel
from envs.tools.block_list import BlockList, read_questions
from envs.tools.keys import ToolSetupError
from envs.tools.recording import Recording
from envs.tools.registry import Parts, open_tool
from envs.types import Tool

if TYPE_CHECKING:
    from envs.sandbox import Sandbox, SandboxState


class Toolbox(AbstractContextManager["Toolbox"]):
    """Holds what all episodes share. `episode` gives the switched-on tools, in the config's order.

    `own_model` asks the run's frozen base model, for `base_generator`. Raises ToolSetupError when a tool cannot be
    switched on: a key is missing, a class cannot be imported, a recording is not there; SandboxRefusedError where this
    machine cannot give the sandbox of `code`.
    """

    def __init__(self, config: EnvsConfig, *, own_model: AskModel | None = None) -> None:
        with ExitStack() as lifetime:
            sandbox = lifetime.enter_context(open_sandbox(config)) if "code" in config.actions else None
            parts = Parts(
                config=config,
                lifetime=lifetime,
                block_list=_block_list(config),
                recording=Recording(Path(path), config.recording.mode) if (path := config.recording.path) else None,
                own_model=own_model,
                sandbox=sandbox,
            )
            self.sandbox: SandboxState | None = sandbox.state if sandbox else None
            self._tools = [open_tool(action, parts) for action in config.actions]
            self._lifetime = lifetime.pop_all()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._lifetime.close()

    @contextmanager
    def episode(self) -> Iterator[list[Tool]]:
        """Tools for one task: a code REPL of its own, no state from any other task."""
        with ExitStack() as stack:
            yield [stack.enter_context(open_one()) for open_one in self._tools]


def open_sandbox(config: EnvsConfig) -> "Sandbox":
    """The sandbox of the `code` tool. Raises SandboxRefusedError."""
    from envs.sandbox import Sandbox, SandboxSettings

    settings = config.sandbox
    return Sandbox(
        SandboxSettings(memory_mb=settings.memory_mb, idle_memory_mb=settings.idle_memory_mb, tier=settings.tier)
    )


def _block_list(config: EnvsConfig) -> BlockList:
    path = config.web.blocked_questions
    try:
        return BlockList(config.web.blocked_hosts, read_questions(Path(path)) if path else ())
    except ValueError as error:
        raise ToolSetupError(f"envs.web.blocked_questions: {error}") from None
