"""A worker without vLLM and a learner without a model, for runs in which only the surrounding actors are real.

They replace `rollout.worker.Worker` and `learner.learner.Learner`. Groups sleep instead of sampling. The learner's
weights count how often each group was trained, so the adapter of the last version shows lost and duplicated groups.
"""

import asyncio
import hashlib
import json
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from configs.base import Precision
from envs.types import Task, ToolCall, ToolResult
from rollout.engines.engine import BASE_VERSION, EngineLoad, Pulse
from rollout.engines.read_back import ReadBack
from rollout.guide import Guide
from rollout.types import Completion, Group, Trajectory, Turn

if TYPE_CHECKING:
    # A worker's process has no use for numpy and torch, which these would bring.
    from learner.types import Adapter, StepResult, TrainBatch

VOCABULARY = 150_000
NUM_GROUPS = 4096
Fate = Literal["signal", "all_right", "all_wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Lognormal seconds of groups, outcomes that do not depend on them, and the tokens of a turn.

    By default as in a small real run.
    """

    median_s: float = 0.2
    sigma: float = 0.8
    shares: Mapping[Fate, float] = field(default_factory=lambda: {"signal": 1.0})
    turn_tokens: int = 50


DEFAULT_SHAPE = GroupShape()
PROMPT_TOKENS, RESULT_TOKENS, NUM_TURNS = 150, 30, 5


class SimulatedEngine:
    """An engine with only a policy version. `failure` ends its worker. `adapter` is what it computes with, `memory`
    what it was given and what it holds."""

    def __init__(self) -> None:
        self.policy_version = BASE_VERSION
        self.failure: BaseException | None = None
        self.adapter: bytes | None = None
        self.memory = (b"", b"")
        self._in_order = asyncio.Lock()
        self._started = time.monotonic()

    @property
    def load(self) -> EngineLoad:
        busy_s = time.monotonic() - self._started
        return EngineLoad(busy_s=busy_s, kv_usage=0.0, num_waiting=0, num_preemptions=0)

    async def prepare_adapter(self, version: int, adapter: bytes) -> tuple[int, bytes]:
        return version, adapter

    async def load_prepared(self, prepared: tuple[int, bytes]) -> str:
        async with self._in_order:
            return await self.take_up(*prepared)

    async def take_up(self, version: int, adapter: bytes) -> str:
        """Where tests put what may go wrong."""
        self.adapter, self.policy_version, self.memory = adapter, version, (adapter, adapter)
        return hashlib.sha256(adapter).hexdigest()

    async def pulse(self) -> Pulse:
        async with self._in_order:
            return Pulse()

    async def read_back(self) -> ReadBack:
        async with self._in_order:
            given, held = (hashlib.sha256(one).hexdigest() for one in self.memory)
            return ReadBack(given=given, held=held)


class SimulatedWorker:
    """The same task takes as long and has the same outcomes at every attempt, in every process. It runs no code, so it
    has no `sandbox`."""

    sandbox = None

    def __init__(self, index: int, shape: GroupShape = DEFAULT_SHAPE, engine: SimulatedEngine | None = None) -> None:
        self.index = index
        self.engine = engine or SimulatedEngine()
        self._shape = shape

    def begin_round(self, num_groups: int) -> None:
        """There is no lockstep to prepare."""

    async def hints(self, task: Task) -> str:
        return ""

    async def run_group(self, task: Task, group_id: str, group_size: int, hints: str = "") -> Group:
        rng, shape = random.Random(task.id), self._shape
        seconds = shape.median_s * rng.lognormvariate(0.0, shape.sigma)
        (fate,) = rng.choices(list(shape.shares), list(shape.shares.values()))
        num_right = {"signal": rng.randint(1, group_size - 1), "all_right": group_size}.get(fate, 0)
        # One of the siblings takes the whole time.
        paces = [1.0] + [rng.uniform(0.3, 1.0) for _ in range(group_size - 1)]
        answers = [_answer(task, right=index < num_right) for index in range(group_size)]
        played = (
            self._play(task, f"{group_id}/{index}", seconds=seconds * pace, answer=answer)
            for index, (pace, answer) in enumerate(zip(paces, answers, strict=True))
        )
        return Group(id=group_id, trajectories=tuple(await asyncio.gather(*played)))

    async def run_guided(self, task: Task, group_id: str, guides: Sequence[Guide], hints: str) -> Group:
        """Every guided attempt is right."""
        answer, num = _answer(task, right=True), len(guides)
        played = (self._play(task, f"{group_id}/guided/{n}", seconds=0.1, answer=answer) for n in range(num))
        return Group(id=group_id, trajectories=tuple(await asyncio.gather(*played)))

    async def demonstrate(self, tasks: Sequence[Any]) -> list[Trajectory]:
        """Without a model there is nothing to imitate."""
        return []

    def close(self) -> None:
        """Nothing is open."""

    async def _play(self, task: Task, trajectory_id: str, *, seconds: float, answer: str) -> Trajectory:
        rng, turn_s = random.Random(trajectory_id), seconds / NUM_TURNS
        prompt, turns = _tokens(task.id, PROMPT_TOKENS), []
        for number in range(NUM_TURNS):
            version = self.engine.policy_version
            await asyncio.sleep(turn_s)
            last = number == NUM_TURNS - 1
            call = ToolCall(name="answer", arguments=answer) if last else ToolCall(name="search", arguments="it")
            turn = _turn(prompt, call, rng, self._shape.turn_tokens, version, turn_s)
            prompt = prompt + turn.token_ids + _tokens(trajectory_id, RESULT_TOKENS)
            turns.append(turn)
        return Trajectory(
            id=trajectory_id,
            group_id=trajectory_id.rpartition("/")[0],
            task=task,
            turns=tuple(turns),
            answer=answer,
            stop_reason="answered",
        )


class SimulatedLearner:
    """Adds one to the weight of every group in a batch."""

    writes = True

    def __init__(self, *, step_s: float = 0.0) -> None:
        import torch

        self._torch = torch
        self._weights = torch.nn.Parameter(torch.zeros(NUM_GROUPS))
        self._step_s = step_s
        self.policy_version = 0
        self.reset_optimizer(1.0)

    def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0, num_steps: int | None = None) -> None:
        """A step size other than one would not count."""
        self.optimizer = self._torch.optim.SGD([self._weights], lr=1.0)
        self.num_steps_done = 0

    def set_reference(self) -> None:
        """There is no KL term."""

    def train_step(self, batch: "TrainBatch") -> "StepResult":
        from learner.types import StepResult

        started = time.perf_counter()
        time.sleep(self._step_s)
        samples = [sample for microbatch in batch.microbatches for sample in microbatch]
        self._weights.grad = self._torch.zeros_like(self._weights)
        for ordinal in {int(sample.trajectory_id.lstrip("g").partition("/")[0]) for sample in samples}:
            self._weights.grad[ordinal] = -1.0
        self.optimizer.step()
        self.policy_version += 1
        self.num_steps_done += 1
        metrics = {
            **dict.fromkeys(("policy/loss", "policy/skipped", "policy/logprob_gap_abs"), 0.0),
            **dict.fromkeys(("policy/staleness_max", "policy/age_mean"), float(batch.max_age)),
            "learner/step_s": time.perf_counter() - started,
            "learner/loss_tokens": float(batch.num_loss_tokens),
            "learner/packed_tokens": float(sum(len(sample.token_ids) for sample in samples)),
        }
        return StepResult(policy_version=self.policy_version, metrics=metrics)

    def adapter(self, precision: Precision = "float32") -> "Adapter":
        from learner.types import Adapter

        data = self._weights.detach().numpy().tobytes()
        return Adapter(policy_version=self.policy_version, data=data, digest=hashlib.sha256(data).hexdigest())

    def load_adapter(self, adapter: "Adapter") -> None:
        with self._torch.no_grad():
            self._weights.copy_(self._torch.tensor(array("f", adapter.data[: 4 * len(self._weights)])))
        self.policy_version = adapter.policy_version


def trained_counts(adapter: bytes) -> dict[int, int]:
    """How often each group was trained, by the weights of a `SimulatedLearner`; groups that were not are left out."""
    weights = array("f", adapter[: 4 * NUM_GROUPS])
    return {ordinal: int(count) for ordinal, count in enumerate(weights) if count}


def _answer(task: Task, *, right: bool) -> str:
    return task.answer if right else str(int(task.answer) + 1)


def _turn(
    prompt: tuple[int, ...], call: ToolCall, rng: random.Random, num_tokens: int, version: int, seconds: float
) -> Turn:
    tokens, logprobs = _pool()
    start = rng.randrange(len(tokens) - num_tokens)
    thought = "I look up what one of them weighs. " * 3
    return Turn.of(
        role="planner",
        prompt_token_ids=prompt,
        completion=Completion(
            token_ids=tokens[start : start + num_tokens],
            logprobs=logprobs[start : start + num_tokens],
            text=json.dumps({"thought": thought, "action": call.name, "action_input": call.arguments}),
            finish_reason="stop",
            policy_version=version,
        ),
        trainable=True,
        grammar="planner",
        thought=thought,
        tool_call=call,
        tool_result=ToolResult(text="The weight of one of them is 85 kg, as every catalogue of them says. " * 2),
        generate_s=round(seconds, 4),
    )


def _tokens(name: str, num: int) -> tuple[int, ...]:
    tokens, _ = _pool()
    start = random.Random(name).randrange(len(tokens) - num)
    return tokens[start : start + num]


@cache
def _pool() -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return tokens and their log-probs, drawn once: drawing would take most of a simulated worker's time."""
    rng = random.Random(0)
    tokens = tuple(rng.randrange(VOCABULARY) for _ in range(20_000))
    # An engine's are float32: as JSON they have some eighteen digits.
    return tokens, tuple(array("f", (-rng.expovariate(2.0) for _ in range(20_000))))
