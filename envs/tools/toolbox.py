"""The tools of a run: each action in `envs.actions` becomes a tool, opened separately for every task."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.envs import EnvsConfig
from configs.errors import UserError
from envs.datasets.families import build_catalogue
from envs.tools.actions import AnswerTool, AskModel, BaseGeneratorTool, PythonCodeTool, ThinkTool, build_ask
from envs.tools.function_tool import check_custom_tool, custom_tool_factory, function_tool
from envs.tools.guard import BlockList, CachedTool, GuardedTool, RecordedTool, Recording, faults_of, read_questions
from envs.tools.http import ServiceLimits
from envs.tools.search import OfflineSearchTool
from envs.tools.web_fetch import PageFetcher
from envs.tools.web_search import GoogleFinder, PageFinder, PageSearchTool, TavilyFinder, WebSearchTool, WikipediaFinder
from envs.types import Tool

if TYPE_CHECKING:
    from envs.sandbox import Sandbox, SandboxState

OpenTool = Callable[[], AbstractContextManager[Tool]]
"""Opens the tool for one episode, and closes it at its end."""

WIKIPEDIA_URL = "https://en.wikipedia.org/w/api.php"
TIME_LIMIT_S = 30.0
CODE_TIME_LIMIT_S = 5.0
"""Wall-clock limit of one request to a service, attempts and pauses included, and of a call of an MCP server's tool; a
page has half of it. A call that takes 20 times as long leaves its attempt unscored."""
CACHE_AGE_S = 3600.0
CACHE_ENTRIES = 1024
REQUESTS_PER_MINUTE = 60.0
"""Pace of one worker's requests to one service."""
PAGES_PER_MINUTE = 120.0
"""Pace of one worker's page fetches."""
MAX_PAGE_BYTES = 1_000_000
"""Limit of a page, before and after decompression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The shared parts that the tools of a run are made from."""

    config: EnvsConfig
    block_list: BlockList
    recording: Recording | None
    own_model: AskModel | None
    sandbox: "Sandbox | None"
    finders: dict[str, PageFinder] = field(default_factory=dict)
    """Search services by name. All tools share one object, so that the pace is that of the worker."""

    @property
    def limits(self) -> ServiceLimits:
        return ServiceLimits(time_limit_s=TIME_LIMIT_S, requests_per_minute=REQUESTS_PER_MINUTE)

    def finder(self, name: str) -> PageFinder:
        """Return the search service of this name."""
        if name not in self.finders:
            web = self.config.web
            if name == "wikipedia":
                self.finders[name] = WikipediaFinder(self.limits, base_url=WIKIPEDIA_URL)
            elif name == "google":
                self.finders[name] = GoogleFinder(self.limits)
            else:
                self.finders[name] = TavilyFinder(self.limits, excluded_hosts=web.blocked_hosts)
        return self.finders[name]

    def guarded(self, tool: Tool) -> Tool:
        """Return a guarded, and possibly recorded, tool whose results come from outside."""
        # The limit also covers the wait for a turn; the time limit of the episode is usually tighter.
        guarded = GuardedTool(tool, self.block_list, time_limit_s=20 * TIME_LIMIT_S)
        return RecordedTool(guarded, self.recording) if self.recording else guarded

    def shared(self, tool: Tool) -> OpenTool:
        """Return one guarded tool with a cache for all episodes."""
        return _lent(self.guarded(CachedTool(tool, max_entries=CACHE_ENTRIES, max_age_s=CACHE_AGE_S)))


def _code(parts: Parts) -> OpenTool:
    sandbox = parts.sandbox
    assert sandbox is not None  # opened together with this action
    return lambda: _closing(PythonCodeTool(sandbox, timeout_s=CODE_TIME_LIMIT_S))


def _search(parts: Parts) -> OpenTool:
    config = parts.config
    if config.search == "tavily":
        return _page_search("search", "search the web with a short query of a few keywords", "tavily", parts)
    passages = build_catalogue().passages
    return _lent(OfflineSearchTool(passages, max_chars=config.max_result_chars, latency_s=config.search_latency_s))


def _page_search(name: str, description: str, finder: str, parts: Parts) -> OpenTool:
    max_chars = parts.config.max_result_chars
    tool = PageSearchTool(name, description, parts.finder(finder), block_list=parts.block_list, max_chars=max_chars)
    return parts.shared(tool)


def _web_search(parts: Parts) -> OpenTool:
    config = parts.config
    limits = ServiceLimits(
        max_attempts=2,
        time_limit_s=TIME_LIMIT_S / 2,
        requests_per_minute=PAGES_PER_MINUTE,
        max_bytes=MAX_PAGE_BYTES,
    )
    fetcher = PageFetcher(limits, block_list=parts.block_list, allowed_hosts=config.web.allowed_hosts)
    finder = parts.finder(config.web.finder)
    return parts.shared(WebSearchTool(fetcher, finder, block_list=parts.block_list, max_chars=config.max_result_chars))


BUILDERS: dict[str, Callable[[Parts], OpenTool]] = {
    "think": lambda _: _lent(ThinkTool()),
    "search": _search,
    "code": _code,
    "answer": lambda _: _lent(AnswerTool()),
    "wikipedia_search": partial(_page_search, "wikipedia_search", "find Wikipedia articles by keywords", "wikipedia"),
    "web_search": _web_search,
    "google_search": partial(_page_search, "google_search", "search Google with a short query", "google"),
    "base_generator": lambda parts: parts.shared(
        BaseGeneratorTool(build_ask(parts.config.base_generator, parts.limits, parts.own_model))
    ),
}


def _custom(name: str, parts: Parts) -> OpenTool:
    """Return a custom tool, guarded: a function is shared, any other tool is made for every episode."""
    config = parts.config.tools[name]
    if function := function_tool(name, config):
        return _lent(parts.guarded(function))
    if parts.recording and not config.stateless:
        raise UserError(
            f"envs.tools.{name} may keep state during a task, but envs.recording answers equal calls alike; set "
            f"envs.tools.{name}.stateless=true if it keeps none, or leave envs.recording out"
        )
    max_chars = parts.config.max_result_chars
    make = custom_tool_factory(name, config, time_limit_s=TIME_LIMIT_S, max_chars=max_chars)

    @contextmanager
    def open_tool() -> Iterator[Tool]:
        with faults_of(name):
            made = make()
        with _closing(made) as tool:
            yield parts.guarded(tool)

    try:
        first = make()
    except Exception as error:
        raise UserError(
            f"envs.tools.{name}: the tool cannot be made without arguments, as each task needs it: "
            f"{type(error).__name__}: {error}"
        ) from error
    with _closing(first) as tool:
        check_custom_tool(name, tool)
    return open_tool


def _lent(tool: Tool) -> OpenTool:
    return lambda: nullcontext(tool)


@contextmanager
def _closing(tool: Any) -> Iterator[Any]:
    try:
        yield tool
    finally:
        if hasattr(tool, "close"):
            tool.close()


class Toolbox(AbstractContextManager["Toolbox"]):
    """The parts that all episodes share.

    Args:
        config: The switched-on actions and their settings.
        own_model: Asks the run's frozen base model, for `base_generator`.

    Raises:
        UserError: If a tool cannot be switched on: a key is missing, a class cannot be imported, a recording does not
            exist, or this machine cannot provide the sandbox of `code`.
    """

    def __init__(self, config: EnvsConfig, *, own_model: AskModel | None = None) -> None:
        questions = config.web.blocked_questions
        try:
            block_list = BlockList(config.web.blocked_hosts, read_questions(Path(questions)) if questions else ())
        except ValueError as error:
            raise UserError(f"envs.web.blocked_questions: {error}") from None
        with ExitStack() as lifetime:
            sandbox = lifetime.enter_context(open_sandbox(config)) if "code" in config.actions else None
            parts = Parts(
                config=config,
                block_list=block_list,
                recording=Recording(Path(path), config.recording_mode) if (path := config.recording) else None,
                own_model=own_model,
                sandbox=sandbox,
            )
            self.sandbox: SandboxState | None = sandbox.state if sandbox else None
            self._tools = [
                BUILDERS[action](parts) if action in BUILDERS else _custom(action, parts) for action in config.actions
            ]
            self._lifetime = lifetime.pop_all()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._lifetime.close()

    @contextmanager
    def episode(self) -> Iterator[list[Tool]]:
        """Open the tools for one task, in the configured order, without state from any other task."""
        with ExitStack() as stack:
            yield [stack.enter_context(open_tool()) for open_tool in self._tools]


def open_sandbox(config: EnvsConfig) -> "Sandbox":
    """Open the sandbox of the `code` tool; raises SandboxRefusedError."""
    from envs.sandbox import Sandbox, SandboxSettings

    return Sandbox(SandboxSettings(tier=config.sandbox))
