"""The records of a rollout: a group holds trajectories, a trajectory holds turns.

Rewards, step scores and advantages are fields that are None until they are known. Token ids and log-probs are stored as
bytes (little-endian int32 and float32), so that encoding copies them as they are (`rollout.codec`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

import numpy as np
from msgspec import Struct

from envs.types import Task, ToolCall, ToolResult

Role = Literal["planner", "verifier", "generator"]
ChatRole = Literal["system", "user", "assistant"]
FinishReason = Literal["stop", "length"]
StopReason = Literal["answered", "verified", "format", "context", "calls", "failed", "infrastructure"]
"""`failed` is wrong: the agent's own code failed or went beyond a limit. `infrastructure` is unscored."""
Ending = Literal["ready", "all_right", "all_wrong", "overlong", "unscored"]
"""How a group ended: with a difference to learn from, or one of the ways to be filtered."""

SCHEMA = 4
"""Of every stored trajectory. Files with another number are rejected."""
SERVED_VERSION = -2
"""Policy version of a model server's completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat, as text."""

    role: ChatRole
    content: str


def is_answer(text: str | None) -> TypeGuard[str]:
    """Return whether a text is an answer: blank texts, which custom agents may return, are not."""
    return text is not None and bool(text.strip())


def packed_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32."""
    return np.asarray(token_ids, dtype="<i4").tobytes()


def packed_floats(values: Sequence[float] | np.ndarray) -> bytes:
    """Return numbers as little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def ids_of(data: bytes) -> np.ndarray:
    """Return the int32 array `[n]` that `packed_ids` packed."""
    return np.frombuffer(data, dtype="<i4")


def floats_of(data: bytes) -> np.ndarray:
    """Return the float32 array `[n]` that `packed_floats` packed."""
    return np.frombuffer(data, dtype="<f4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one model call, as an engine returns it. The text is never tokenized again for training."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probabilities of `token_ids` after temperature and grammar: the distribution that was sampled from."""
    text: str
    finish_reason: FinishReason
    policy_version: int
    """Version that sampled the first token."""
    switches: tuple[tuple[int, int], ...] = ()
    """Changes of weights in the middle: index of the first token of the newer weights, and their version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCompletion(Completion):
    """A model server's completion. Without token ids and their log-probs nothing can be trained on it."""

    token_ids: tuple[int, ...] = field(default=(), init=False)
    logprobs: tuple[float, ...] = field(default=(), init=False)
    policy_version: int = field(default=SERVED_VERSION, init=False)
    num_prompt_tokens: int
    num_tokens: int


class Turn(Struct, kw_only=True, omit_defaults=True):
    """One model call and the tool result that it led to."""

    role: Role
    prompt: bytes = b""
    """Token ids of the whole prompt."""
    prompt_start: int = 0
    """Leading tokens that an encoded turn leaves out, as they repeat the planner turn before it. 0 in memory."""
    tokens: bytes = b""
    logprobs: bytes = b""
    """Of `tokens`, under the distribution that was sampled from."""
    learner_logprobs: bytes | None = None
    """Of `tokens`, under the learner before its update: nan if too old to train, None for untrained turns."""
    text: str
    finish_reason: FinishReason
    policy_version: int
    """Version that sampled the first token."""
    switches: tuple[tuple[int, int], ...] = ()
    """As in `Completion`."""
    served: tuple[int, int] | None = None
    """Prompt and completion tokens as a model server counted them."""
    trainable: bool
    grammar: str | None = None
    """EBNF; None for free text."""
    thought: str = ""
    tool_call: ToolCall | None = None
    tool_result: ToolResult | None = None
    format_error: str | None = None
    heard: str | None = None
    """Messages that a custom agent added since the reply that its prompt continues."""
    generate_s: float = 0.0
    """Wall time of the model call, including the wait for a place."""
    tool_s: float = 0.0
    """For a custom agent the time from the reply to its next call or its end."""
    score: float | None = None
    """Of a process reward model or turn scorer."""
    num_candidates: int = 1
    """Samples of this decision, of which a guide took this one by its score."""
    advantage: float | None = None
    same_steps: tuple[float, ...] = ()
    """Advantages of all attempts of the group that made this decision after the same prompt."""

    @classmethod
    def of(cls, *, role: Role, prompt_token_ids: Sequence[int], completion: Completion, **known: Any) -> "Turn":
        """Return the turn of one model call; `known` are its other fields."""
        return cls(
            role=role,
            prompt=packed_ids(prompt_token_ids),
            tokens=packed_ids(completion.token_ids),
            logprobs=packed_floats(completion.logprobs),
            text=completion.text,
            finish_reason=completion.finish_reason,
            policy_version=completion.policy_version,
            switches=completion.switches,
            served=(completion.num_prompt_tokens, completion.num_tokens)
            if isinstance(completion, TextCompletion)
            else None,
            **known,
        )

    @property
    def completion(self) -> Completion:
        """The completion as an engine of the run returns it."""
        return Completion(
            token_ids=tuple(ids_of(self.tokens).tolist()),
            logprobs=tuple(floats_of(self.logprobs).tolist()),
            text=self.text,
            finish_reason=self.finish_reason,
            policy_version=self.policy_version,
            switches=self.switches,
        )

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(ids_of(self.prompt).tolist())

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(ids_of(self.tokens).tolist())

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def dialogue(self) -> bytes:
        return self.prompt + self.tokens

    @property
    def token_versions(self) -> list[int]:
        """The version that sampled each token."""
        versions = [self.policy_version] * self.num_tokens
        for index, version in self.switches:
            versions[index:] = [version] * (self.num_tokens - index)
        return versions

    @property
    def truncated(self) -> bool:
        """True if the token limit cut the completion, whatever its last token."""
        return self.finish_reason == "length"


class Reward(Struct, kw_only=True, frozen=True):
    """The judgement of one trajectory."""

    outcome: float | None
    """Raw accuracy, for filters and reports. None where the trajectory could not be scored."""
    total: float | None
    """The reward for training, with penalties. None also where a rule keeps it out of training."""


class Spread(Struct, kw_only=True, frozen=True):
    """Mean and sample standard deviation (n - 1) of `num` numbers; 0 where there are too few."""

    num: int
    mean: float
    std: float


class GroupCredit(Struct, kw_only=True, frozen=True):
    """How a group's advantages were computed, with the spread of its total rewards."""

    scheme: str
    totals: Spread


class Trajectory(Struct, kw_only=True, omit_defaults=True, tag_field="schema", tag=SCHEMA):
    """One attempt at a task."""

    id: str
    group_id: str
    task: Task
    turns: tuple[Turn, ...]
    answer: str | None
    stop_reason: StopReason
    failure: str | None = None
    reward: Reward | None = None
    prm_digest: str | None = None
    """Weights of the scoring process reward model; empty where none could be reached."""
    credit: GroupCredit | None = None
    phase: str = "train"
    step: int | None = None
    """Train step in whose log it stands."""
    verdict: str | None = None
    """State of its group in the log of the step (`rollout.lifecycle.State`)."""
    reason: str = ""
    """Why its group was not trained."""
    trained_as: int | None = None
    """Policy version whose update used it."""

    @property
    def planner_turns(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.role == "planner")

    @property
    def outcome(self) -> float | None:
        return self.reward.outcome if self.reward else None

    @property
    def total(self) -> float | None:
        return self.reward.total if self.reward else None

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """The planner turns by number, each in one branch.

        A turn continues the branch whose dialogue its prompt begins with, the longest of several; any other begins a
        new one.
        """
        branches: list[list[int]] = []
        ends: list[bytes] = []
        for number, turn in enumerate(self.planner_turns):
            continued = [at for at, end in enumerate(ends) if turn.prompt.startswith(end)]
            at = max(continued, key=lambda at: len(ends[at]), default=len(branches))
            if at == len(branches):
                branches.append([])
                ends.append(b"")
            branches[at].append(number)
            ends[at] = turn.dialogue
        return tuple(map(tuple, branches))

    @property
    def num_sampled_tokens(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def served(self) -> bool:
        """True if a model server answered, so that there is nothing to train on."""
        return any(turn.served is not None for turn in self.planner_turns)

    @property
    def num_format_errors(self) -> int:
        return sum(turn.format_error is not None for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """True if the token limit cut a planner turn."""
        return any(turn.truncated for turn in self.planner_turns)


class Group(Struct, kw_only=True):
    """All attempts at one task that are compared with each other."""

    id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def task(self) -> Task:
        return self.trajectories[0].task

    @property
    def outcomes(self) -> list[float | None]:
        return [trajectory.outcome for trajectory in self.trajectories]

    @property
    def totals(self) -> list[float | None]:
        return [trajectory.total for trajectory in self.trajectories]

    @property
    def token_versions(self) -> dict[int, int]:
        """Numbers of trainable planner tokens, by the policy version that sampled them."""
        turns = (turn for trajectory in self.trajectories for turn in trajectory.planner_turns if turn.trainable)
        return dict(Counter(version for turn in turns for version in turn.token_versions))


class StepScores(Struct, kw_only=True, frozen=True):
    """The scores of a group's planner turns."""

    raw: tuple[tuple[float | None, ...], ...]
    """`raw[i][j]` belongs to planner turn j of trajectory i; None where the scorer gave none."""
    prm_digest: str
    """As in `Trajectory`."""

    def write_to(self, group: Group) -> None:
        for trajectory, scores in zip(group.trajectories, self.raw, strict=True):
            trajectory.prm_digest = self.prm_digest
            for turn, score in zip(trajectory.planner_turns, scores, strict=True):
                turn.score = score


class GroupSummary(Struct, kw_only=True, frozen=True):
    """What the buffer needs of a finished group, so that it never decodes the group itself."""

    ending: Ending | None
    """None where fewer than two trajectories could be scored: the group is tried again."""
    versions: Mapping[int, int] = {}
    """Numbers of trainable tokens by policy version."""
    duration_s: float = 0.0
    """Seconds from the permit to the judgement."""
    right: float = 0.0
    """Sum of the outcomes."""
    scored: int = 0
    """Trajectories with an outcome."""
    facts: Mapping[str, float] = {}
    """Counts, added up over groups (`reward.statistics`)."""
    reason: str = ""
    """Why trajectories could not be scored."""
