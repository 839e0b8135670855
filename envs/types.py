"""What the world exchanges with the agent: tasks, tool calls, tool results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
"""A JSON schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question with its reference answer.

    `answer` is what the data set's scorer compares with: the exact answer, or for Game of 24 the four
    numbers separated by spaces. It never reaches a prompt, a tool or the sandbox; nor does `metadata`, JSON values
    that a scorer of one's own may read. `scorer` says who compares: None is the data set's comparison, else `text`,
    `integer`, `math`, `choice` or a `module:name`, which may take `scoring_limit_s` seconds.
    """

    id: str
    dataset: str
    question: str
    answer: str
    scorer: str | None = None
    scoring_limit_s: float = 10.0
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One request to a tool, as the planner wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What a tool answered.

    `text` is what the planner reads. `error` is None, or the category of a failure that the caller's
    input caused ("timeout", "memory", "syntax", ...): an observation, never an infrastructure fault.
    `foreign`: the text comes from outside and may be hostile; models read it as a marked quotation.
    """

    text: str
    error: str | None = None
    foreign: bool = False


class ToolUnavailableError(RuntimeError):
    """The tool itself broke (worker died, network down): nobody's answer was wrong, nothing is scored."""


class Tool(Protocol):
    """One action of the planner.

    `name` stands in the planner's grammar and `description` in its prompt. `arguments` is the planner's
    `action_input`, any text at all, or the JSON of an object. `call` raises `ToolUnavailableError` for infrastructure
    faults only.
    """

    name: str
    description: str

    async def call(self, arguments: str) -> ToolResult: ...
