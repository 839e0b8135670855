"""The agent: planner, executor, verifier until done, then the generator. One call gives one trajectory."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from configs.rollout import ModuleConfig, RuleConfig
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

_log = logging.getLogger(__name__)


class AnyAgent(Protocol):
    """The built-in planner, or an agent of one's own."""

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
    """The evolving record that verifier and generator read; the planner sees the same as its dialogue."""

    entries: list[MemoryEntry] = field(default_factory=list)

    @property
    def answer(self) -> str | None:
        """What the last step answered; None where it was another one."""
        last = self.entries[-1].call if self.entries else None
        return last.arguments if last and last.name == "answer" else None

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
        return ("continue" if memory.answer is None else "stop"), None


@dataclass(frozen=True, slots=True)
class FrozenModule:
    """Asks the frozen base model, never the trained adapter."""

    engine: Engine
    chat: Chat
    max_tokens: int

    async def ask(
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
        return Turn(role=role, prompt_token_ids=prompt, completion=completion, trainable=False)


class ModelVerifier(FrozenModule):
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
        return memory.answer, None


class ModelGenerator(FrozenModule):
    """Lets a model write the answer from memory."""

    async def answer(self, task: Task, memory: Memory, trajectory_id: str) -> tuple[str | None, Turn | None]:
        turn = await self.ask("generator", _GENERATOR_SYSTEM, task, memory, trajectory_id)
        return turn.completion.text.strip() or None, turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The modules of the flow. `tools_for_episode` opens fresh tools for every task."""

    engine: Engine
    chat: Chat
    planner: PlannerSettings
    format_retries: int
    max_result_chars: int
    max_context_tokens: int
    timeout_s: float
    tools_for_episode: ToolsForEpisode
    verifier: Verifier
    generator: Generator

    async def run(
        self, task: Task, *, trajectory_id: str, group_id: str, on_turn: TurnListener | None = None, hints: str = ""
    ) -> Trajectory:
        """Play one task to its end; the planner reads `hints` with it. A broken engine or tool, the time limit, or
        anything else that is raised ends it as `infrastructure`: recorded as far as it came, unscorable, never wrong,
        and no harm to those that play beside it."""
        turns: list[Turn] = []
        answer: str | None = None
        stop_reason: StopReason = "infrastructure"
        failure: str | None = None
        try:
            with self.tools_for_episode() as tools:
                limit = TimeLimit(self.timeout_s)
                episode = _Episode(self, task, tools, trajectory_id, turns, on_turn, hints, limit)
                async with limit:
                    played = await episode.play()
            answer, stop_reason = played
        except (EngineError, TimeoutError):
            pass
        except ToolUnavailableError as error:
            _log.warning("trajectory %s ends unscored: %s", trajectory_id, error)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
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


def _is_cancelled() -> bool:
    """From outside; a tool may raise what looks like it by itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


class _Episode:
    """The state of one run: its dialogue, its memory, its record. It adds to `turns` as they happen."""

    def __init__(
        self,
        agent: Agent,
        task: Task,
        tools: list[Tool],
        trajectory_id: str,
        turns: list[Turn],
        on_turn: TurnListener | None,
        hints: str,
        limit: TimeLimit,
    ) -> None:
        self._agent = agent
        self._limit = limit
        self._task = task
        self._trajectory_id = trajectory_id
        self._dialogue = PlannerDialogue(agent.engine, agent.chat, agent.planner, task, tools, trajectory_id, hints)
        self._executor = Executor(tools, agent.max_result_chars)
        self._memory = Memory()
        self._on_turn = on_turn
        self._generate_s = 0.0
        self._turns = turns

    async def play(self) -> tuple[str | None, StopReason]:
        for step in range(1, self._agent.planner.max_steps + 1):
            reply = await self._decide(step)
            if reply is None:
                return None, "context"
            if reply.decision is None:
                # Degraded: the step is spent without a tool call, the planner knows why.
                continue
            if await self._execute(step, reply) == "stop":
                break
        return await self._finish()

    async def _decide(self, step: int) -> PlannerReply | None:
        """A decision, or the malformed reply after the last retry; None when the context is full."""
        for retry in range(self._agent.format_retries + 1):
            room = self._agent.max_context_tokens - self._dialogue.num_tokens
            if room < self._agent.planner.max_turn_tokens:
                return None
            started = time.perf_counter()
            try:
                with self._limit.paused():
                    reply = await self._dialogue.decide(step)
            except ContextFullError:
                return None
            self._generate_s = round(time.perf_counter() - started, 4)
            if reply.decision is not None:
                return reply
            self._record_planner(reply, None, None)
            spent = retry == self._agent.format_retries
            self._dialogue.reject(reply, min(step + spent, self._agent.planner.max_steps))
        return reply

    async def _execute(self, step: int, reply: PlannerReply) -> str:
        assert reply.decision is not None
        started = time.perf_counter()
        call, result = await self._executor.execute(reply.decision)
        self._record_planner(reply, call, result, tool_s=round(time.perf_counter() - started, 4))
        self._memory.entries.append(MemoryEntry(step=step, call=call, result=result))
        with self._limit.paused():
            verdict, turn = await self._agent.verifier.verify(self._task, self._memory, self._trajectory_id)
        self._record(turn)
        if verdict == "continue":
            self._dialogue.observe(reply, result, step + 1)
        return verdict

    async def _finish(self) -> tuple[str | None, StopReason]:
        with self._limit.paused():
            answer, turn = await self._agent.generator.answer(self._task, self._memory, self._trajectory_id)
        self._record(turn)
        if self._memory.answer is not None:
            return answer, "answered"
        return answer, "verified" if answer is not None else "format"

    def _record_planner(
        self, reply: PlannerReply, call: ToolCall | None, result: ToolResult | None, tool_s: float = 0.0
    ) -> None:
        served = isinstance(reply.completion, TextCompletion)
        self._record(
            Turn(
                role="planner",
                prompt_token_ids=reply.prompt_token_ids,
                completion=reply.completion,
                trainable=not served,
                grammar=None if served else reply.grammar,
                thought=reply.decision.thought if reply.decision else "",
                tool_call=call,
                tool_result=result,
                format_error=reply.format_error,
                generate_s=self._generate_s,
                tool_s=tool_s,
            )
        )

    def _record(self, turn: Turn | None) -> None:
        if turn is None:
            return
        self._turns.append(turn)
        if self._on_turn:
            self._on_turn(turn)


def build_chat(model_path: Path) -> ChatFormat:
    """Raises ChatTemplateError."""
    from transformers import AutoTokenizer

    return ChatFormat(AutoTokenizer.from_pretrained(model_path))


def check_chat(model_path: Path) -> ChatFormat:
    """What `build_chat` gives, found out without torch. Raises ChatTemplateError."""
    import transformers

    # Whichever class a tokenizer is of, its template is rendered alike; AutoTokenizer imports torch.
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
    """The agent that a run's configuration describes, sampling at `temperature` (0: greedy)."""
    rollout = config.rollout
    planner = PlannerSettings(
        actions=config.envs.actions,
        schemas=function_schemas(config.envs),
        prompt=rollout.prompt,
        max_steps=rollout.max_steps,
        max_turn_tokens=rollout.max_turn_tokens,
        temperature=temperature,
    )
    return Agent(
        engine=engine,
        chat=chat,
        planner=planner,
        format_retries=rollout.format_retries,
        max_result_chars=config.envs.max_result_chars,
        max_context_tokens=rollout.engine.max_model_len,
        timeout_s=rollout.episode_timeout_s,
        tools_for_episode=tools_for_episode,
        verifier=_build_verifier(rollout.verifier, engine, chat),
        generator=_build_generator(rollout.generator, engine, chat),
    )


def _build_verifier(config: ModuleConfig, engine: Engine, chat: Chat) -> Verifier:
    return RuleVerifier() if isinstance(config, RuleConfig) else ModelVerifier(engine, chat, config.max_tokens)


def _build_generator(config: ModuleConfig, engine: Engine, chat: Chat) -> Generator:
    return RuleGenerator() if isinstance(config, RuleConfig) else ModelGenerator(engine, chat, config.max_tokens)
