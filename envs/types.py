"""What the environment exchanges with the agent: tasks, tool calls and tool results."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Schema: TypeAlias = Mapping[str, Any]
"""A JSON schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question with its reference answer."""

    id: str
    dataset: str
    question: str
    answer: str
    """What the scorer compares with: the exact answer, or for Game of 24 the four numbers separated by spaces. It never
    reaches a prompt, a tool or the sandbox."""
    scorer: str | None = None
    """None for the data set's comparison, else `text`, `integer`, `math`, `choice` or a `module:name`."""
    scoring_limit_s: float = 10.0
    """Time limit of a custom scorer."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON values that a custom scorer may read. They reach nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A request to a tool, as the planner wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer of a tool."""

    text: str
    """What the planner reads."""
    error: str | None = None
    """Category of a failure that the caller's input caused ("timeout", "memory", "syntax", ...): an observation, not
    an infrastructure fault."""
    foreign: bool = False
    """Whether the text comes from outside and may be hostile. Models read it as a marked quotation."""


class ToolUnavailableError(RuntimeError):
    """A fault of the tool's infrastructure (worker died, network down). The attempt is not scored."""


class Tool(Protocol):
    """One action of the planner."""

    name: str
    """The action in the planner's grammar."""
    description: str
    """The tool's line in the planner's prompt."""

    async def call(self, arguments: str) -> ToolResult:
        """Run the tool with the planner's `action_input`, a text or the JSON of an object.

        Raises ToolUnavailableError for infrastructure faults only.
        """
        ...
