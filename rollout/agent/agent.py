"""The built-in agent: a planner and an executor, a verifier after each step, and a generator at the end."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from configs.rollout import RolloutConfig
from configs.run import RunConfig
from envs.tools.function_tool import function_schemas
from envs.tools.guard import raised
from envs.types import Task, Tool, ToolCall, ToolResult, ToolUnavailableError
from rollout.agent.planner import (
    FormatError,
    Schemas,
    opening,
    parse_decision,
    planner_grammar,
    planner_schema,
    shown,
    step_line,
)
from rollout.chat import Chat, ChatFormat, ChatTemplateError
from rollout.engines.engine import ContextFullError, Engine, EngineError, GenerationRequest, TimeLimit, TimeLimitError
from rollout.files import TOKENIZER
from rollout.guide import Guide
from rollout.types import Message, Role, StopReason, TextCompletion, Trajectory, Turn

TurnListener = Callable[[Turn], None]

FROZEN_MAX_TOKENS = 256
"""Length limit of a verdict or answer of the frozen base model."""
_VERIFIER_GRAMMAR = 'root ::= "continue" | "stop"'
_VERIFIER_SYSTEM = (
    "You check the work of an agent. Say stop if the steps so far suffice to answer the task, else continue."
)
_GENERATOR_SYSTEM = "Give the final answer to the task from the steps below. Write the answer alone."
_log = logging.getLogger(__name__)


def stop_of_failure(turns: Sequence[Turn], rollout: RolloutConfig) -> StopReason:
    """Return how a failed attempt ends. What happens before the first reply is not the policy's doing."""
    return "failed" if turns and rollout.count_failed else "infrastructure"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The built-in agent of a run."""

    config: RunConfig
    engine: Engine
    chat: Chat
    tools_for_episode: Callable[[], AbstractContextManager[list[Tool]]]
    """Opens new tools for a task."""
    temperature: float
    """0 is greedy."""
    guide: Guide | None = None
    """Chooses the planner's decisions in one attempt; None takes the first sample."""

    @cached_property
    def schemas(self) -> Schemas:
        """The schemas of custom functions."""
        return function_schemas(self.config.envs)

    async def run(
        self, task: Task, *, trajectory_id: str, group_id: str, on_turn: TurnListener | None = None, hints: str = ""
    ) -> Trajectory:
        """Run one attempt, with `hints` in the planner's prompt.

        The time limit ends it as `failed`. A broken engine or tool, or any other error, ends it as `infrastructure`:
        recorded up to there and unscored, without affecting other attempts.
        """
        turns: list[Turn] = []
        answer: str | None = None
        stop_reason: StopReason = "infrastructure"
        failure: str | None = None
        try:
            with self.tools_for_episode() as tools:
                episode = _Episode(self, task, trajectory_id, tools, hints, turns, on_turn)
                async with episode.limit.running():
                    played = await episode.play()
            answer, stop_reason = played
        except EngineError:
            pass
        except TimeLimitError as error:
            failure = str(error)
            stop_reason = stop_of_failure(turns, self.config.rollout)
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


@dataclass
class _Episode:
    """The state of one attempt."""

    agent: Agent
    task: Task
    trajectory_id: str
    tools: Sequence[Tool]
    hints: str
    turns: list[Turn]
    """Grows while the attempt runs, so that a failed attempt is recorded up to its failure."""
    on_turn: TurnListener | None

    def __post_init__(self) -> None:
        self._config, self._planner, rollout = self.agent.config, self.agent.config.planner, self.agent.config.rollout
        self.limit = TimeLimit(rollout.episode_timeout_s, rollout.wall_timeout_s)
        system, user = opening(self.tools, self.task, self._planner.max_steps, self.hints, self._planner.prompt)
        # The planner's dialogue as token ids and as messages, to which text is only appended.
        self._context = self.agent.chat.prompt(system, user)
        self._messages = [Message(role="system", content=system), Message(role="user", content=user)]
        self._memory: list[str] = []
        self._answer: str | None = None

    async def play(self) -> tuple[str | None, StopReason]:
        for step in range(1, self._planner.max_steps + 1):
            turn = await self._decide(step)
            if turn is None:
                return None, "context"
            if turn.tool_call and await self._execute(step, turn, turn.tool_call):
                break
        answer = self._answer
        if self._planner.generator != "rule":
            answer = (await self._ask_frozen("generator", _GENERATOR_SYSTEM)).strip() or None
        if self._answer is not None:
            return answer, "answered"
        return answer, "verified" if answer is not None else "format"

    async def _decide(self, step: int) -> Turn | None:
        """Return the turn of a decision; None if the context is full.

        A step without a decision after the last retry is spent without a tool call; the planner reads why.
        """
        rollout = self._config.rollout
        for retry in range(self._planner.format_retries + 1):
            if rollout.engine.max_model_len - len(self._context) < rollout.max_turn_tokens:
                return None
            try:
                if guide := self.agent.guide:
                    with self.limit.paused():
                        turn, _ = await guide.choose(self.turns, partial(self._sample, step))
                else:
                    turn, _ = await self._sample(step)
            except ContextFullError:
                return None
            self._context += turn.token_ids
            self._messages.append(Message(role="assistant", content=turn.text))
            if turn.tool_call:
                break
            self._record(turn)
            spent = retry == self._planner.format_retries
            told = f"Invalid reply: {turn.format_error}. Write one short JSON object."
            self._tell(turn, told, min(step + spent, self._planner.max_steps))
        return turn

    async def _sample(self, step: int) -> tuple[Turn, None]:
        actions = ("answer",) if step == self._planner.max_steps else self._config.envs.actions
        schemas, prompt, started = self.agent.schemas, self._context, time.perf_counter()
        grammar = planner_grammar(actions, schemas)
        request = GenerationRequest(
            trajectory_id=self.trajectory_id,
            prompt_token_ids=prompt,
            max_tokens=self._config.rollout.max_turn_tokens,
            temperature=self.agent.temperature,
            grammar=grammar,
            messages=tuple(self._messages),
            json_schema=planner_schema(actions, schemas),
        )
        with self.limit.paused():
            completion = await self.agent.engine.generate(request)
        generate_s = round(time.perf_counter() - started, 4)
        decision, wrong = None, None
        try:
            if completion.finish_reason == "length":
                raise FormatError("the reply was cut because it was too long")
            decision = parse_decision(completion.text, actions, schemas)
        except FormatError as error:
            wrong = str(error)
        served = isinstance(completion, TextCompletion)
        turn = Turn.of(
            role="planner",
            prompt_token_ids=prompt,
            completion=completion,
            trainable=not served,
            grammar=None if served else grammar,
            thought=decision.thought if decision else "",
            tool_call=ToolCall(name=decision.action, arguments=decision.arguments) if decision else None,
            format_error=wrong,
            generate_s=generate_s,
        )
        return turn, None

    async def _execute(self, step: int, turn: Turn, call: ToolCall) -> bool:
        """Run the tool that a turn decided on, and return whether the verifier stops the attempt."""
        started, max_chars = time.perf_counter(), self._config.envs.max_result_chars
        turn.tool_result = result = await execute(self.tools, call, max_chars)
        turn.tool_s = round(time.perf_counter() - started, 4)
        self._record(turn)
        # One line per step, for verifier and generator; text that a tool found takes further lines.
        self._memory.append(f"Step {step}: {call.name}({call.arguments}) -> {shown(result)}")
        self._answer = call.arguments if call.name == "answer" else None
        stops = self._answer is not None
        if self._planner.verifier != "rule":
            stops = await self._ask_frozen("verifier", _VERIFIER_SYSTEM, _VERIFIER_GRAMMAR) == "stop"
        if not stops:
            self._tell(turn, f"Result: {shown(result)}", step + 1)
        return stops

    async def _ask_frozen(self, role: Role, system: str, grammar: str | None = None) -> str:
        """Let the frozen base model, never the trained adapter, reply to the memory of the steps."""
        memory = "\n".join(self._memory)
        prompt = self.agent.chat.prompt(system, f"Task: {self.task.question}\n{memory}")
        request = GenerationRequest(
            trajectory_id=self.trajectory_id,
            prompt_token_ids=prompt,
            max_tokens=FROZEN_MAX_TOKENS,
            temperature=0.0,
            grammar=grammar,
            use_adapter=False,
        )
        with self.limit.paused():
            completion = await self.agent.engine.generate(request)
        self._record(Turn.of(role=role, prompt_token_ids=prompt, completion=completion, trainable=False))
        return completion.text

    def _tell(self, turn: Turn, text: str, next_step: int) -> None:
        """Append a text after a turn, and the first line of the next step."""
        text = f"{text}\n{step_line(next_step, self._planner.max_steps)}"
        self._context += self.agent.chat.bridge(turn.token_ids, text)
        self._messages.append(Message(role="user", content=text))

    def _record(self, turn: Turn) -> None:
        self.turns.append(turn)
        if self.on_turn:
            self.on_turn(turn)


async def execute(tools: Sequence[Tool], call: ToolCall, max_chars: int) -> ToolResult:
    """Run a tool, and cut a long result in the middle. Raises ToolUnavailableError."""
    result = await next(tool for tool in tools if tool.name == call.name).call(call.arguments)
    text, half = result.text.strip(), max_chars // 2
    if len(text) > max_chars:
        text = f"{text[:half]} ...[{len(text) - 2 * half} characters cut]... {text[-half:]}"
    return replace(result, text=text)


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
