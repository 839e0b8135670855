"""The tools of a run: each action in `envs.actions` becomes a tool, opened separately for every task."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from configs.api_keys import required_key
from configs.envs import BASE_GENERATOR_TOKENS, EnvsConfig
from configs.errors import UserError
from configs.plugins import failure
from configs.rollout import ServerConfig
from envs.datasets.families import catalogue_passages
from envs.sandbox import Sandbox, SandboxSettings, SandboxState
from envs.tools.function_tool import check_custom_tool, custom_tool_factory, function_tool
from envs.tools.guard import BlockList, CachedTool, GuardedTool, faults_of, read_questions
from envs.tools.http import Service, ServiceLimits
from envs.tools.search import (
    OfflineSearchTool,
    PageFinder,
    PageSearchTool,
    TavilyFinder,
    WebSearchTool,
    WikipediaFinder,
)
from envs.tools.web_fetch import PageFetcher
from envs.types import Tool, ToolResult, ToolUnavailableError

MakeTool = Callable[[], Tool]
"""Returns the tool for one episode, which may have a `close`."""

AskModel = Callable[[str], Awaitable[str]]
"""From a prompt to the model's answer; raises ToolUnavailableError or an error of the engine."""

WIKIPEDIA_URL = "https://en.wikipedia.org/w/api.php"
TIME_LIMIT_S = 30.0
"""Wall-clock limit of one request to a service, attempts and pauses included, and of a call of an MCP server's tool; a
page has half of it. A call that takes 20 times as long leaves its attempt unscored."""
CODE_TIME_LIMIT_S = 5.0
"""Wall-clock limit of one code call."""
CACHE_ENTRIES = 1024
PAGES_PER_MINUTE = 120.0
"""Pace of one worker's page fetches."""
MAX_PAGE_BYTES = 1_000_000
"""Limit of a page, before and after decompression."""
PAGE_SEARCHES = {
    "search": ("tavily", "search the web with a short query of a few keywords"),
    "wikipedia_search": ("wikipedia", "find Wikipedia articles by keywords"),
}
"""Service and description of the searches that show extracts of pages."""
MAX_PROMPT_CHARS = 8000


class ThinkTool:
    name = "think"
    description = "note a thought"

    async def call(self, arguments: str) -> ToolResult:
        return ToolResult(text="Noted.")


class AnswerTool:
    name = "answer"
    description = "give the final answer"

    async def call(self, arguments: str) -> ToolResult:
        return ToolResult(text=arguments)


class PythonCodeTool:
    """A Python interpreter in the sandbox. Later calls see the names of earlier ones."""

    name = "code"
    description = "run Python (math, sympy, numpy); names persist, the last expression is shown"

    def __init__(self, sandbox: Sandbox, *, timeout_s: float) -> None:
        self._executor = sandbox.executor
        self._episode = sandbox.episode()
        self._timeout_s = timeout_s

    async def call(self, arguments: str) -> ToolResult:
        run = partial(self._episode.run, arguments, timeout_s=self._timeout_s)
        try:
            result = asyncio.get_running_loop().run_in_executor(self._executor, run)
        except RuntimeError as error:  # raised by a thread pool after its shutdown
            raise ToolUnavailableError("the sandbox is closed") from error
        return await result

    def close(self) -> None:
        self._episode.close()


class BaseGeneratorTool:
    """A language model without tools."""

    name = "base_generator"
    description = "ask a language model that has no tools; state everything it needs to know"

    def __init__(self, ask: AskModel) -> None:
        self._ask = ask

    async def call(self, arguments: str) -> ToolResult:
        prompt = arguments.strip()[:MAX_PROMPT_CHARS]
        if not prompt:
            return ToolResult(text="The model needs a question.", error="empty_query")
        return ToolResult(text=(await self._ask(prompt)).strip() or "The model gave no answer.")


def build_ask(config: ServerConfig | None, limits: ServiceLimits, own_model: AskModel | None) -> AskModel:
    """Return a function that asks the configured server, else the run's `own_model`, greedily; raises UserError."""
    if config is None:
        if own_model is None:
            raise UserError(
                "base_generator needs a model: set envs.base_generator.base_url and .model to an OpenAI-compatible "
                "server, because this command has no engine of a run"
            )
        return own_model
    key = ""
    if variable := config.api_key_env:
        key = required_key("base_generator", variable, "or leave envs.base_generator.api_key_env out")
    service = Service("base_generator", config.base_url, limits, key=key, advice="check envs.base_generator")

    async def attempt(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        body = {"model": config.model, "messages": messages, "temperature": 0, "max_tokens": BASE_GENERATOR_TOKENS}
        reply = await service.send("POST", "/chat/completions", body=body)
        return str(reply["choices"][0]["message"]["content"] or "")

    return lambda prompt: service.ask(lambda: attempt(prompt))


def _open(make: MakeTool, stack: ExitStack) -> Tool:
    """Make a tool, and close it with the stack."""
    tool = make()
    stack.callback(getattr(tool, "close", lambda: None))
    return tool


class Toolbox(AbstractContextManager["Toolbox"]):
    """The parts that all episodes share; `own_model` asks the run's frozen base model, for `base_generator`.

    Raises UserError if a tool cannot be switched on: a key is missing, a class cannot be imported, or this machine
    cannot provide the sandbox of `code`.
    """

    def __init__(self, config: EnvsConfig, *, own_model: AskModel | None = None) -> None:
        self._config = config
        self._own_model = own_model
        questions = config.web.blocked_questions
        self._block_list = BlockList(config.web.blocked_hosts, read_questions(Path(questions)) if questions else ())
        self._limits = ServiceLimits(time_limit_s=TIME_LIMIT_S)
        # One object for all tools, so that the pace is that of the worker.
        self._finder = cache(self._new_finder)
        with ExitStack() as lifetime:
            self._sandbox: Sandbox | None = None
            if "code" in config.actions:
                self._sandbox = lifetime.enter_context(Sandbox(SandboxSettings(tier=config.sandbox)))
            self._makers = [self._maker(action) for action in config.actions]
            self._lifetime = lifetime.pop_all()

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._lifetime.close()

    @property
    def sandbox(self) -> SandboxState | None:
        """The tier of the sandbox, None without `code`."""
        return self._sandbox.state if self._sandbox else None

    @contextmanager
    def episode(self) -> Iterator[list[Tool]]:
        """Open the tools for one task, in the configured order, without state from any other task."""
        with ExitStack() as stack:
            yield [_open(make, stack) for make in self._makers]

    def _maker(self, action: str) -> MakeTool:
        config, sandbox, max_chars = self._config, self._sandbox, self._config.max_result_chars
        match action:
            case "think":
                return ThinkTool
            case "answer":
                return AnswerTool
            case "code" if sandbox is not None:
                return lambda: PythonCodeTool(sandbox, timeout_s=CODE_TIME_LIMIT_S)
            case "search" if config.search == "offline":
                latency_s = config.search_latency_s
                offline = OfflineSearchTool(catalogue_passages(), max_chars=max_chars, latency_s=latency_s)
                return lambda: offline
            case "search" | "wikipedia_search":
                service, description = PAGE_SEARCHES[action]
                finder, blocked = self._finder(service), self._block_list
                search = PageSearchTool(action, description, finder, block_list=blocked, max_chars=max_chars)
                return self._shared(search)
            case "web_search":
                return self._shared(self._page_reader())
            case "base_generator":
                return self._shared(BaseGeneratorTool(build_ask(config.base_generator, self._limits, self._own_model)))
        return self._custom(action)

    def _page_reader(self) -> WebSearchTool:
        config, block_list = self._config, self._block_list
        pace, limit_s = PAGES_PER_MINUTE, TIME_LIMIT_S / 2
        limits = ServiceLimits(max_attempts=2, time_limit_s=limit_s, requests_per_minute=pace, max_bytes=MAX_PAGE_BYTES)
        fetcher = PageFetcher(limits, block_list=block_list, allowed_hosts=config.web.allowed_hosts)
        finder = self._finder(config.web.finder)
        return WebSearchTool(fetcher, finder, block_list=block_list, max_chars=config.max_result_chars)

    def _new_finder(self, name: str) -> PageFinder:
        if name == "wikipedia":
            return WikipediaFinder(self._limits, base_url=WIKIPEDIA_URL)
        return TavilyFinder(self._limits, excluded_hosts=self._config.web.blocked_hosts)

    def _guarded(self, tool: Tool) -> Tool:
        # The limit also covers the wait for a turn; the time limit of the episode is usually tighter.
        return GuardedTool(tool, self._block_list, time_limit_s=20 * TIME_LIMIT_S)

    def _shared(self, tool: Tool) -> MakeTool:
        """Return one guarded tool with a cache for all episodes."""
        shared = self._guarded(CachedTool(tool, max_entries=CACHE_ENTRIES))
        return lambda: shared

    def _custom(self, name: str) -> MakeTool:
        """Return a custom tool, guarded: a function is shared, any other tool is made for every episode."""
        config, max_chars = self._config.tools[name], self._config.max_result_chars
        if function := function_tool(name, config):
            return lambda: self._guarded(function)
        make = custom_tool_factory(name, config, time_limit_s=TIME_LIMIT_S, max_chars=max_chars)

        def make_guarded() -> Tool:
            with faults_of(name):
                return self._guarded(make())

        try:
            with ExitStack() as stack:
                check_custom_tool(name, _open(make, stack))
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"envs.tools.{name}: the tool cannot be made for each task: {failure(error)}") from None
        return make_guarded
