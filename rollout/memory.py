"""What one episode has done so far. Made fresh for every task: two tasks never see each other."""

from dataclasses import dataclass, field

from envs.types import ToolCall, ToolResult
from rollout.quoting import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """One executed step."""

    step: int
    thought: str
    call: ToolCall
    result: ToolResult


@dataclass(slots=True)
class Memory:
    """The evolving record that verifier and generator read; the planner sees the same as its dialogue."""

    entries: list[MemoryEntry] = field(default_factory=list)

    def add(self, entry: MemoryEntry) -> None:
        self.entries.append(entry)

    def render(self) -> str:
        """One line per step, oldest first; what a tool found outside takes lines of its own."""
        return "\n".join(
            f"Step {entry.step}: {entry.call.name}({entry.call.arguments}) -> {shown(entry.result)}"
            for entry in self.entries
        )
