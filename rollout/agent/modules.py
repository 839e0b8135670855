"""The modules around the planner: memory, executor, verifier, generator."""

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from envs.types import Task, Tool, ToolCall, ToolResult
from rollout.agent.planner import Decision, shown
from rollout.chat import Chat
from rollout.engines.engine import Engine, GenerationRequest
from rollout.types import Role, Turn


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


class Executor:
    """Tools by name, for one episode. `think` and `answer` are tools like the others."""

    def __init__(self, tools: list[Tool], max_result_chars: int) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._max_result_chars = max_result_chars

    async def execute(self, decision: Decision) -> tuple[ToolCall, ToolResult]:
        """Run the decision's tool. Raises ToolUnavailableError when the tool itself is broken."""
        call = ToolCall(name=decision.action, arguments=decision.arguments)
        result = await self._tools[call.name].call(call.arguments)
        return call, replace(result, text=cut_middle(result.text.strip(), self._max_result_chars))


def cut_middle(text: str, max_chars: int) -> str:
    """Keep both ends of a long text and say how much is missing between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]} ...[{len(text) - 2 * half} characters cut]... {text[-half:]}"


Verdict = Literal["continue", "stop"]
_GRAMMAR = 'root ::= "continue" | "stop"'
_VERIFIER_SYSTEM = (
    "You check the work of an agent. Say stop if the steps so far suffice to answer the task, else continue."
)


class Verifier(Protocol):
    async def verify(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[Verdict, Turn | None]:
        """The verdict, and the model call behind it where there was one."""
        ...


class RuleVerifier:
    """Continues until the planner answers."""

    async def verify(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[Verdict, Turn | None]:
        answered = bool(memory.entries) and memory.entries[-1].call.name == "answer"
        return ("stop" if answered else "continue"), None


class FrozenModel:
    """Asks the frozen base model, never the trained adapter."""

    def __init__(self, engine: Engine, chat: Chat, max_tokens: int) -> None:
        self._engine = engine
        self._chat = chat
        self._max_tokens = max_tokens

    async def ask(
        self, role: Role, system: str, task: Task, memory: Memory, trajectory_id: str, *, grammar: str | None = None
    ) -> Turn:
        prompt = self._chat.prompt(system, f"Task: {task.question}\n{memory.render()}")
        completion = await self._engine.generate(
            GenerationRequest(
                trajectory_id=trajectory_id,
                prompt_token_ids=prompt,
                max_tokens=self._max_tokens,
                temperature=0.0,
                grammar=grammar,
                use_adapter=False,
            )
        )
        return Turn(role=role, prompt_token_ids=prompt, completion=completion, trainable=False)


class ModelVerifier(FrozenModel):
    """Lets a model decide whether the task is done."""

    async def verify(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[Verdict, Turn | None]:
        turn = await self.ask("verifier", _VERIFIER_SYSTEM, task, memory, trajectory_id, grammar=_GRAMMAR)
        return ("stop" if turn.completion.text == "stop" else "continue"), turn


_GENERATOR_SYSTEM = "Give the final answer to the task from the steps below. Write the answer alone."


class Generator(Protocol):
    async def answer(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[str | None, Turn | None]:
        """The final answer (None: there is none), and the model call behind it where there was one."""
        ...


class RuleGenerator:
    """Takes over what the planner answered; without an answer step there is no answer."""

    async def answer(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[str | None, Turn | None]:
        last = memory.entries[-1].call if memory.entries else None
        return (last.arguments if last and last.name == "answer" else None), None


class ModelGenerator(FrozenModel):
    """Lets a model write the answer from memory."""

    async def answer(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[str | None, Turn | None]:
        turn = await self.ask("generator", _GENERATOR_SYSTEM, task, memory, trajectory_id)
        return turn.completion.text.strip() or None, turn
