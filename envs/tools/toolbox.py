"""The tools of a run: each action that `envs.actions` names becomes a tool, opened fresh for every task."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.envs import EnvsConfig
from configs.errors import UserError
from envs.datasets.families import build_catalogue
from envs.http import ServiceLimits
from envs.tools.actions import AnswerTool, AskModel, BaseGeneratorTool, PythonCodeTool, ThinkTool, build_ask
from envs.tools.function_tool import check_own, function_tool, make_first, own_maker
from envs.tools.guard import BlockList, CachedTool, GuardedTool, RecordedTool, Recording, faults_of, read_questions
from envs.tools.search import OfflineSearchTool
from envs.tools.web_fetch import PageFetcher
from envs.tools.web_search import GoogleFinder, PageFinder, PageSearchTool, TavilyFinder, WebSearchTool, WikipediaFinder
from envs.types import Tool

if TYPE_CHECKING:
    from envs.sandbox import Sandbox, SandboxState

OpenTool = Callable[[], AbstractContextManager[Tool]]
"""Gives the tool of one episode, and ends it with the episode."""

CACHE_AGE_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the tools of a run are made from."""

    config: EnvsConfig
    block_list: BlockList
    recording: Recording | None
    own_model: AskModel | None
    sandbox: "Sandbox | None"
    finders: dict[str, PageFinder] = field(default_factory=dict)
    """Those that a tool asks, by their services."""

    @property
    def limits(self) -> ServiceLimits:
        web = self.config.web
        return ServiceLimits(time_limit_s=web.time_limit_s, requests_per_minute=web.requests_per_minute)

    def guarded(self, tool: Tool) -> Tool:
        """A tool whose results come from outside: guarded, and recorded where the configuration says so."""
        # Calls wait for their turn as well; the agent's own limit of an episode is the tighter one then.
        guarded = GuardedTool(tool, self.block_list, time_limit_s=20 * self.config.web.time_limit_s)
        return RecordedTool(guarded, self.recording) if self.recording else guarded

    def shared(self, tool: Tool) -> OpenTool:
        """One tool for all episodes, guarded, that keeps what it was answered."""
        entries = self.config.web.cache_entries
        cached = CachedTool(tool, max_entries=entries, max_age_s=CACHE_AGE_S) if entries else tool
        return _lent(self.guarded(cached))


def _code(parts: Parts) -> OpenTool:
    sandbox = parts.sandbox
    assert sandbox is not None  # it is there wherever this action is
    return lambda: _closing(PythonCodeTool(sandbox, timeout_s=parts.config.sandbox.timeout_s))


def _search(parts: Parts) -> OpenTool:
    config = parts.config
    if config.search == "tavily":
        return _page_search("search", "search the web with a short query of a few keywords", "tavily", parts)
    offline = OfflineSearchTool(
        build_catalogue().passages,
        max_results=config.search_results,
        max_chars=config.max_result_chars,
        latency_s=config.search_latency_s,
    )
    return _lent(offline)


def _page_search(name: str, description: str, finder: str, parts: Parts) -> OpenTool:
    max_chars = parts.config.max_result_chars
    found = _finder(finder, parts)
    return parts.shared(PageSearchTool(name, description, found, block_list=parts.block_list, max_chars=max_chars))


def _finder(name: str, parts: Parts) -> PageFinder:
    """One for all tools that ask this service: its pace is that of the worker, not of a tool."""
    if name not in parts.finders:
        parts.finders[name] = _new_finder(name, parts)
    return parts.finders[name]


def _new_finder(name: str, parts: Parts) -> PageFinder:
    web = parts.config.web
    if name == "wikipedia":
        return WikipediaFinder(parts.limits, base_url=web.wikipedia_url, max_results=web.max_results)
    if name == "google":
        return GoogleFinder(parts.limits, max_results=web.max_results)
    return TavilyFinder(parts.limits, max_results=web.max_results, excluded_hosts=web.blocked_hosts)


def _web(parts: Parts) -> OpenTool:
    config = parts.config
    fetcher = PageFetcher(
        ServiceLimits(
            max_attempts=2,
            time_limit_s=config.web.time_limit_s / 2,
            requests_per_minute=config.web.pages_per_minute,
            max_bytes=config.web.max_page_bytes,
        ),
        block_list=parts.block_list,
        allowed_hosts=config.web.allowed_hosts,
    )
    tool = WebSearchTool(
        fetcher,
        _finder(config.web.finder, parts),
        block_list=parts.block_list,
        max_chars=config.max_result_chars,
        max_passages=config.web.max_results,
    )
    return parts.shared(tool)


BUILDERS: dict[str, Callable[[Parts], OpenTool]] = {
    "think": lambda _: _lent(ThinkTool()),
    "search": _search,
    "code": _code,
    "answer": lambda _: _lent(AnswerTool()),
    "wikipedia_search": partial(_page_search, "wikipedia_search", "find Wikipedia articles by keywords", "wikipedia"),
    "web_search": _web,
    "google_search": partial(_page_search, "google_search", "search Google with a short query", "google"),
    "base_generator": lambda parts: parts.shared(
        BaseGeneratorTool(build_ask(parts.config.base_generator, parts.limits, parts.own_model))
    ),
}


def _own(name: str, parts: Parts) -> OpenTool:
    """Somebody's own tool, guarded like all that comes from outside: a function, or made afresh for every episode."""
    config = parts.config.tools[name]
    if function := function_tool(name, config):
        return _lent(parts.guarded(function))
    if parts.recording and not config.stateless:
        raise UserError(
            f"envs.tools.{name} may keep state through a task, and envs.recording answers equal calls alike; set "
            f"envs.tools.{name}.stateless=true if it keeps none, or leave envs.recording.path out"
        )
    limit_s, max_chars = parts.config.web.time_limit_s, parts.config.max_result_chars
    make = own_maker(name, config, time_limit_s=limit_s, max_chars=max_chars)

    @contextmanager
    def open_one() -> Iterator[Tool]:
        with faults_of(name):
            made = make()
        with _closing(made) as tool:
            yield parts.guarded(tool)

    with _closing(make_first(name, make)) as tool:
        check_own(name, tool)
    return open_one


def _lent(tool: Tool) -> OpenTool:
    return lambda: nullcontext(tool)


@contextmanager
def _closing(tool: Any) -> Iterator[Any]:
    """The tool; at the end its `close`, where it has one."""
    try:
        yield tool
    finally:
        if hasattr(tool, "close"):
            tool.close()


class Toolbox(AbstractContextManager["Toolbox"]):
    """Holds what all episodes share. `episode` gives the switched-on tools, in the config's order.

    `own_model` asks the run's frozen base model, for `base_generator`. Raises UserError when a tool cannot be
    switched on: a key is missing, a class cannot be imported, a recording is not there; SandboxRefusedError where this
    machine cannot give the sandbox of `code`.
    """

    def __init__(self, config: EnvsConfig, *, own_model: AskModel | None = None) -> None:
        with ExitStack() as lifetime:
            sandbox = lifetime.enter_context(open_sandbox(config)) if "code" in config.actions else None
            parts = Parts(
                config=config,
                block_list=_block_list(config),
                recording=Recording(Path(path), config.recording.mode) if (path := config.recording.path) else None,
                own_model=own_model,
                sandbox=sandbox,
            )
            self.sandbox: SandboxState | None = sandbox.state if sandbox else None
            self._tools = [
                BUILDERS[action](parts) if action in BUILDERS else _own(action, parts) for action in config.actions
            ]
            self._lifetime = lifetime.pop_all()

    def __exit__(self, *raised: object) -> None:
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
        raise UserError(f"envs.web.blocked_questions: {error}") from None
