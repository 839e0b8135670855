"""The environment of the agent: task mix, tools, code sandbox."""

import math
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from configs.api_keys import exposed_key, in_clear_text
from configs.base import Config, MayChange, OwnPath
from configs.errors import did_you_mean
from configs.plugins import code_or
from configs.rollout import ServerConfig

BUILT_IN_ACTIONS = (
    *("think", "search", "code", "answer"),
    *("wikipedia_search", "web_search", "base_generator"),
)
_ACTION_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_HOST = r"[^\s/@:*?#\[\]]+"
_HOST_PORT = rf"^({_HOST}|\[[0-9A-Fa-f:.]+\]):\d{{1,5}}$"


def _positive(mix: dict[str, float]) -> dict[str, float]:
    # So that NaN fails, too.
    if not all(share >= 0 for share in mix.values()) or not 0 < sum(mix.values()) < math.inf:
        raise ValueError(f"shares must be >= 0 with a positive sum that is finite, got {mix}")
    return mix


Mix = Annotated[dict[str, float], AfterValidator(_positive)]
"""Data set name -> share of the tasks."""


class WebConfig(Config):
    """Results from outside: searches, pages, and custom tools."""

    finder: Literal["wikipedia", "tavily"] = "wikipedia"
    """Service that finds the pages that `web_search` reads; `tavily` needs TAVILY_API_KEY and also reads the pages."""
    allowed_hosts: tuple[Annotated[str, Field(pattern=_HOST_PORT)], ...] = ()
    """Servers outside of the public internet, each "host:port", that pages may be fetched from."""
    blocked_hosts: tuple[Annotated[str, Field(pattern=rf"^{_HOST}$")], ...] = (
        *("artofproblemsolving.com", "huggingface.co", "kaggle.com", "4nums.com", "github.com"),
        "githubusercontent.com",
    )
    """Hosts, with their subdomains, that publish benchmarks with answers: the built-in tools read nothing from them."""
    blocked_questions: OwnPath | None = None
    """File of held-out questions, one per line, plain or JSON with `question`: results that hold one are left out."""


class ToolConfig(Config):
    """A custom tool."""

    source: Annotated[str, code_or(r"mcp:.*\S", ", or mcp: and the command or URL of an MCP server")]
    """`module:name` of a function with typed arguments, or of a class with the parts of `envs.types.Tool`; or a tool
    of an MCP server, `mcp:https://host/path` or `mcp:command with arguments`, with `#tool` if it has several, or with
    `#*` for all of them under their own names."""
    description: str = ""
    """Description of an MCP server's tool for the planner; empty takes the server's own, which is asked once when the
    recipe is loaded. Functions and classes have their own."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds an MCP server's API key: a URL gets it as `Authorization: Bearer`, a command as
    this variable and no other; none sends no key."""

    @property
    def is_mcp(self) -> bool:
        return self.source.startswith("mcp:")

    @model_validator(mode="after")
    def _check(self) -> "ToolConfig":
        address = self.source.removeprefix("mcp:").partition("#")[0]
        if self.description and (not self.is_mcp or self.source.endswith("#*")):
            raise ValueError("description is for one tool of an MCP server; all other tools bring their own")
        if self.is_mcp and (where := exposed_key(address)):
            raise ValueError(
                f"source seems to hold a key, {where}, which the run folder, the report and the process list would "
                "show; put it into an environment variable and name that one with api_key_env"
            )
        if self.api_key_env and not self.is_mcp:
            raise ValueError("api_key_env is for an MCP server; functions and classes read keys from the environment")
        if self.api_key_env and address.startswith("http://") and in_clear_text(address):
            raise ValueError("source would send the key in clear text: use https")
        return self


class OwnDatasetConfig(Config):
    source: Annotated[
        OwnPath,
        code_or(
            r"hf:[\w.-]+(/[\w.-]+)?|(?i:.+\.(jsonl|csv|parquet))",
            ", a file *.jsonl, *.csv or *.parquet, or hf:owner/name of the Hugging Face hub",
        ),
    ]
    """A JSON Lines, CSV or Parquet file, also in the recipe's folder; or `module:name` of a function without arguments
    that returns the tasks: `envs.types.Task`s, or tables. Rows and tables have `question`, `answer` and, if wanted,
    `id`, `split`, `scorer` and further columns. Or `hf:owner/name` of the Hugging Face hub."""
    scorer: str | None = None
    """How answers are compared: `text`, `integer`, `math`, `choice`, or `module:name` of a custom function. None:
    the scorer that a task names, else reward.scorer."""
    config: str | None = None
    """Configuration of a hub's data set that has several."""
    split: str = "train"
    """Split of a hub's data set that is trained on."""
    eval_split: str | None = None
    """Split of a hub's data set that is held out; none: half of `split`, by the question's hash."""
    question: str | None = None
    """A hub's column with the question, a text or one message of a user; none: `question`, `prompt` or `messages`."""
    answer: str = "answer"
    """A hub's column with the answer."""

    @property
    def is_hub(self) -> bool:
        return self.source.startswith("hf:")

    @property
    def is_file(self) -> bool:
        return not self.is_hub and ":" not in self.source.rpartition(".")[2]

    @property
    def hub_id(self) -> str:
        return self.source.removeprefix("hf:")

    @model_validator(mode="after")
    def _splits_differ(self) -> "OwnDatasetConfig":
        if self.split == self.eval_split:
            raise ValueError(f"eval_split = '{self.eval_split}' is trained on; name another, or leave it out")
        return self


BASE_GENERATOR_TOKENS = 128
"""Length limit of an answer of `base_generator`."""


class EnvsConfig(Config):
    mix: Mix = {"lookup": 0.6, "two_lookup": 0.4}
    """Data set name -> share of the tasks. Generated: lookup, two_lookup, difference, three_lookup, chain,
    game24; downloaded: aime; further ones: see `datasets`."""
    datasets: dict[str, OwnDatasetConfig] = {}
    """Further data sets by name, which `mix` can name: tasks of a file, of a custom function, or of the hub."""
    actions: tuple[str, ...] = ("think", "search", "code", "answer")
    """Tools that are switched on, in the order of the planner's prompt and grammar; `answer` is always needed.
    Built in: think, search, code, answer, wikipedia_search, web_search, base_generator."""
    tools: dict[str, ToolConfig] = {}
    """Further actions by name: custom tools, and tools of MCP servers."""
    search: Literal["offline", "tavily"] = "offline"
    """`offline` searches the generated catalogue; `tavily` needs TAVILY_API_KEY."""
    search_latency_s: float = Field(default=0.0, ge=0, le=60)
    """Simulated median latency of an offline search, with a heavy tail up to 10 s. For measurements; the same query
    takes equally long in every run."""
    max_result_chars: int = Field(default=400, ge=20)
    """Longer tool results are cut in the middle before the planner reads them."""
    sandbox: MayChange[Literal["auto", "namespaces", "landlock"]] = "auto"
    """Isolation tier of the code tool; `auto` takes the first that the machine supports."""
    web: WebConfig = WebConfig()
    base_generator: ServerConfig | None = None
    """Server of the model behind the tool `base_generator`; none: the run's own frozen base model."""

    @model_validator(mode="after")
    def _check(self) -> "EnvsConfig":
        if "answer" not in self.actions:
            raise ValueError("actions must contain 'answer', or no task could ever end")
        if len(set(self.actions)) != len(self.actions):
            raise ValueError("actions must not contain an action twice")
        for name in self.tools:
            if name in BUILT_IN_ACTIONS or not _ACTION_NAME.fullmatch(name):
                raise ValueError(f"tools.{name}: a name is at most 40 of a-z, 0-9 and _, and none of the built-in ones")
        known = (*BUILT_IN_ACTIONS, *self.tools)
        if unknown := [action for action in self.actions if action not in known]:
            raise ValueError(
                f"actions: '{unknown[0]}' is not built in ({', '.join(BUILT_IN_ACTIONS)}) and not among envs.tools"
                f"{did_you_mean(unknown[0], known)}"
            )
        return self
