"""The built-in agent: a planner and an executor, a verifier after each step, and a generator at the end."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from configs.rollout import Module
from configs.run import RunConfig
from envs.tools.function_tool import function_schemas
from envs.tools.guard import raised
from envs.types import Task, Tool, ToolCall, ToolResult, ToolUnavailableError
from rollout.agent.planner import Decision, PlannerDialogue, PlannerReply, PlannerSettings, shown
from rollout.chat import Chat, ChatFormat, ChatTemplateError
from rollout.engines.engine import ContextFullError, Engine, EngineError, GenerationRequest
from rollout.records import TOKENIZER
from rollout.time_limit import TimeLimit
from rollout.types import Role, StopReason, TextCompletion, Trajectory, Turn

ToolsForEpisode = Callable[[], AbstractContextManager[list[Tool]]]
TurnListener = Callable[[Turn], None]

FROZEN_MAX_TOKENS = 256
"""Length limit of a verdict or answer of the frozen base model."""
_VERIFIER_GRAMMAR = 'root ::= "continue" | "stop"'
_VERIFIER_SYSTEM = (
    "You check the work of an agent. Say stop if the steps so far suffice to answer the task, else continue."
)
_GENERATOR_SYSTEM = "Give the final answer to the task from the steps below. Write the answer alone."
_log = logging.getLogger(__name__)


class AnyAgent(Protocol):
    """The built-in planner or a custom agent."""

    async def run(
        self, task: Task, *, trajectory_id: str, group_id: str, on_turn: TurnListener | None = None, hints: str = ""
    ) -> Trajectory: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEntry:
    """One executed step."""

    step: int
    call: ToolCall
    result: ToolResult


@dataclass(slots=True)
class Memory:
    """The steps so far, which verifier and generator read; the planner sees the same as its dialogue."""

    entries: list[MemoryEntry] = field(default_factory=list)

    @property
    def answer(self) -> str | None:
        """The answer, if the last step gave one."""
        last = self.entries[-1].call if self.entries else None
        return last.arguments if last and last.name == "answer" else None

    def render(self) -> str:
        """Return one line per step, oldest first; text that a tool found outside takes further lines."""
        return "\n".join(
            f"Step {entry.step}: {entry.call.name}({entry.call.arguments}) -> {shown(entry.result)}"
            for entry in self.entries
        )


class Executor:
    """The tools of one episode by name. `think` and `answer` are tools like the others."""

    def __init__(self, tools: list[Tool], max_result_chars: int) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._max_result_chars = max_result_chars

    async def execute(self, decision: Decision) -> tuple[ToolCall, ToolResult]:
        """Run the decision's tool, and cut a long result in the middle. Raises ToolUnavailableError."""
        call = ToolCall(name=decision.action, arguments=decision.arguments)
        result = await self._tools[call.name].call(call.arguments)
        text, half = result.text.strip(), self._max_result_chars // 2
        if len(text) > self._max_result_chars:
            text = f"{text[:half]} ...[{len(text) - 2 * half} characters cut]... {text[-half:]}"
        return call, replace(result, text=text)


@dataclass(frozen=True, slots=True)
class FrozenModule:
    """A verifier or generator that is the frozen base model, never the trained adapter."""

    engine: Engine
    chat: Chat
    max_tokens: int

    async def verify(self, task: Task, memory: Memory, trajectory_id: str) -> Turn:
        """Let the model write "stop" if the steps suffice, else "continue"."""
        return await self._ask("verifier", _VERIFIER_SYSTEM, task, memory, trajectory_id, grammar=_VERIFIER_GRAMMAR)

    async def answer(self, task: Task, memory: Memory, trajectory_id: str) -> Turn:
        """Let the model write the final answer."""
        return await self._ask("generator", _GENERATOR_SYSTEM, task, memory, trajectory_id)

    async def _ask(
        self, role: Role, system: str, task: Task, memory: Memory, trajectory_id: str, *, grammar: str | None = None
    ) -> Turn:
        prompt = self.chat.prompt(system, f"Task: {task.question}\n{memory.render()}")
        completion = await self.engine.generate(
            GenerationRequest(
                trajectory_id=trajectory_id,
                prompt_token_ids=prompt,
                max_tokens=self.max_tokens,
                temperature=0.0,
                grammar=grammar,
                use_adapter=False,
            )
        )
        return Turn.of(role=role, prompt_token_ids=prompt, completion=completion, trainable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The modules of the agent."""

    engine: Engine
    chat: Chat
    planner: PlannerSettings
    format_retries: int
    max_result_chars: int
    max_context_tokens: int
    timeout_s: float
    tools_for_episode: ToolsForEpisode
    """Opens new tools for a task."""
    verifier: FrozenModule | None
    """None: a rule that continues until the planner answers."""
    generator: FrozenModule | None
    """None: a rule that takes the planner's answer."""

    async def run(
        self, task: Task, *, trajectory_id: str, group_id: str, on_turn: TurnListener | None = None, hints: str = ""
    ) -> Trajectory:
        """Run one attempt, with `hints` in the planner's prompt.

        A broken engine or tool, the time limit, or any other error ends it as `infrastructure`: recorded up to there
        and unscored, without affecting other attempts.
        """
        turns: list[Turn] = []
        answer: str | None = None
        stop_reason: StopReason = "infrastructure"
        failure: str | None = None
        try:
            with self.tools_for_episode() as tools:
                limit = TimeLimit(self.timeout_s)
                dialogue = PlannerDialogue(self.engine, self.chat, self.planner, task, tools, trajectory_id, hints)
                executor = Executor(tools, self.max_result_chars)
                episode = _Episode(self, task, trajectory_id, dialogue, executor, limit, turns, on_turn)
                async with limit:
                    played = await episode.play()
            answer, stop_reason = played
        except (EngineError, TimeoutError):
            pass
        except ToolUnavailableError as error:
            _log.warning("trajectory %s ends unscored: %s", trajectory_id, error)
        except (Exception, asyncio.CancelledError) as error:
            running = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (running is None or running.cancelling()):
                # A cancellation from outside; a tool may also raise this error itself.
                raise
            failure = f"the attempt failed with {raised(error)}"
            _log.warning("trajectory %s ends unscored: %s", trajectory_id, failure)
        finally:
            self.engine.release(trajectory_id)
        return Trajectory(
            id=trajectory_id,
            group_id=group_id,
            task=task,
            turns=tuple(turns),
            answer=answer,
            stop_reason=stop_reason,
            failure=failure,
        )


@dataclass(slots=True)
class _Episode:
    """The state of one attempt."""

    agent: Agent
    task: Task
    trajectory_id: str
    dialogue: PlannerDialogue
    executor: Executor
    limit: TimeLimit
    turns: list[Turn]
    """Grows while the attempt runs, so that a failed attempt is recorded up to its failure."""
    on_turn: TurnListener | None
    memory: Memory = field(default_factory=Memory)

    async def play(self) -> tuple[str | None, StopReason]:
        for step in range(1, self.agent.planner.max_steps + 1):
            reply, generate_s = await self._decide(step)
            if reply is None:
                return None, "context"
            if reply.decision is not None and await self._execute(step, reply, reply.decision, generate_s):
                break
        answer = self.memory.answer
        if self.agent.generator is not None:
            with self.limit.paused():
                turn = await self.agent.generator.answer(self.task, self.memory, self.trajectory_id)
            self._record(turn)
            answer = turn.text.strip() or None
        if self.memory.answer is not None:
            return answer, "answered"
        return answer, "verified" if answer is not None else "format"

    async def _decide(self, step: int) -> tuple[PlannerReply | None, float]:
        """Return a decision, or the malformed reply of the last retry, and its seconds; None if the context is full.

        A step with a malformed reply is spent without a tool call; the planner reads why.
        """
        planner = self.agent.planner
        for retry in range(self.agent.format_retries + 1):
            if self.agent.max_context_tokens - self.dialogue.num_tokens < planner.max_turn_tokens:
                return None, 0.0
            started = time.perf_counter()
            try:
                with self.limit.paused():
                    reply = await self.dialogue.decide(step)
            except ContextFullError:
                return None, 0.0
            generate_s = round(time.perf_counter() - started, 4)
            if reply.decision is not None:
                break
            self._record(_planner_turn(reply, generate_s))
            spent = retry == self.agent.format_retries
            self.dialogue.reject(reply, min(step + spent, planner.max_steps))
        return reply, generate_s

    async def _execute(self, step: int, reply: PlannerReply, decision: Decision, generate_s: float) -> bool:
        """Run the decision's tool, and return whether the verifier stops the attempt."""
        started = time.perf_counter()
        call, result = await self.executor.execute(decision)
        tool_s = round(time.perf_counter() - started, 4)
        self._record(_planner_turn(reply, generate_s, call, result, tool_s))
        self.memory.entries.append(MemoryEntry(step=step, call=call, result=result))
        stops = self.memory.answer is not None
        if self.agent.verifier is not None:
            with self.limit.paused():
                turn = await self.agent.verifier.verify(self.task, self.memory, self.trajectory_id)
            self._record(turn)
            stops = turn.text == "stop"
        if not stops:
            self.dialogue.observe(reply, result, step + 1)
        return stops

    def _record(self, turn: Turn) -> None:
        self.turns.append(turn)
        if self.on_turn:
            self.on_turn(turn)


def _planner_turn(
    reply: PlannerReply,
    generate_s: float,
    call: ToolCall | None = None,
    result: ToolResult | None = None,
    tool_s: float = 0.0,
) -> Turn:
    served = isinstance(reply.completion, TextCompletion)
    return Turn.of(
        role="planner",
        prompt_token_ids=reply.prompt_token_ids,
        completion=reply.completion,
        trainable=not served,
        grammar=None if served else reply.grammar,
        thought=reply.decision.thought if reply.decision else "",
        tool_call=call,
        tool_result=result,
        format_error=reply.format_error,
        generate_s=generate_s,
        tool_s=tool_s,
    )


def build_chat(model_path: Path) -> ChatFormat:
    """Load a model's chat format. Raises ChatTemplateError."""
    from transformers import AutoTokenizer

    return ChatFormat(AutoTokenizer.from_pretrained(model_path))


def check_chat(model_path: Path) -> ChatFormat:
    """Load a model's chat format without importing torch. Raises ChatTemplateError."""
    import transformers

    # All tokenizer classes render the template equally, but AutoTokenizer imports torch.
    plain = (model_path / TOKENIZER).is_file()
    loader = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(model_path)
    except Exception as error:
        raise ChatTemplateError(f"its tokenizer cannot be loaded: {' '.join(str(error).split())[:300]}") from error
    return ChatFormat(tokenizer)


def build_agent(
    config: RunConfig,
    *,
    engine: Engine,
    chat: Chat,
    tools_for_episode: ToolsForEpisode,
    temperature: float,
) -> Agent:
    """Build the built-in agent of a run, sampling at `temperature` (0: greedy)."""
    rollout, agent = config.rollout, config.planner
    planner = PlannerSettings(
        actions=config.envs.actions,
        schemas=function_schemas(config.envs),
        prompt=agent.prompt,
        max_steps=agent.max_steps,
        max_turn_tokens=rollout.max_turn_tokens,
        temperature=temperature,
    )

    def module(kind: Module) -> FrozenModule | None:
        return None if kind == "rule" else FrozenModule(engine, chat, FROZEN_MAX_TOKENS)

    return Agent(
        engine=engine,
        chat=chat,
        planner=planner,
        format_retries=agent.format_retries,
        max_result_chars=config.envs.max_result_chars,
        max_context_tokens=rollout.engine.max_model_len,
        timeout_s=rollout.episode_timeout_s,
        tools_for_episode=tools_for_episode,
        verifier=module(agent.verifier),
        generator=module(agent.generator),
    )
