"""The tools of a run: shared parts made once, per-episode tools opened fresh for every task."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from configs.envs import EnvsConfig
from envs.datasets.catalogue import build_catalogue
from envs.sandbox import Sandbox, SandboxSettings
from envs.tools.plain import AnswerTool, ThinkTool
from envs.tools.python_code import PythonCodeTool
from envs.tools.search import OfflineSearchTool
from envs.tools.tavily_search import TavilySearchTool
from envs.types import Tool


class Toolbox(AbstractContextManager["Toolbox"]):
    """Holds the sandbox and the search index. `episode` gives the switched-on tools, in the config's order."""

    def __init__(self, config: EnvsConfig) -> None:
        self._config = config
        self._sandbox = (
            Sandbox(SandboxSettings(memory_mb=config.sandbox.memory_mb)) if "code" in config.actions else None
        )
        self._search = _build_search(config) if "search" in config.actions else None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()

    @contextmanager
    def episode(self) -> Iterator[list[Tool]]:
        """Tools for one task: a code REPL of its own, no state from any other task."""
        tools: dict[str, Tool] = {"think": ThinkTool(), "answer": AnswerTool()}
        if self._search is not None:
            tools["search"] = self._search
        code = None
        if self._sandbox is not None:
            code = PythonCodeTool(self._sandbox, timeout_s=self._config.sandbox.timeout_s)
            tools["code"] = code
        try:
            yield [tools[name] for name in self._config.actions]
        finally:
            if code is not None:
                code.close()


def _build_search(config: EnvsConfig) -> Tool:
    if config.search == "tavily":
        return TavilySearchTool()
    return OfflineSearchTool(
        build_catalogue().passages,
        max_results=config.search_results,
        max_chars=config.max_result_chars,
        latency_s=config.search_latency_s,
    )
