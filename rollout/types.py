"""The record of acting: completions, turns, trajectories, groups. Each is made once and never changed."""

from dataclasses import dataclass
from typing import Literal

from envs.types import Task, ToolCall, ToolResult

Role = Literal["planner", "verifier", "generator"]
StopReason = Literal["answered", "verified", "format", "context", "infrastructure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSwitch:
    """From token `index` of a completion on, this version sampled."""

    index: int
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Everything the sampler knew of one model call. The text is never tokenised again for training.

    `logprobs` are the engine's processed log-probabilities of `token_ids`: after temperature and grammar,
    exactly the distribution that was sampled from. `policy_version` sampled the first token; `switches` says where
    newer weights took over before the last one.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    policy_version: int
    switches: tuple[VersionSwitch, ...] = ()

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The version that sampled each token."""
        versions = [self.policy_version] * len(self.token_ids)
        for switch in self.switches:
            versions[switch.index :] = [switch.policy_version] * (len(versions) - switch.index)
        return tuple(versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call and the tool result it led to.

    `grammar` names the grammar that constrained the sampling (None: free text); `tool_call` is None
    for a malformed turn, `format_error` then says why. Seconds are wall time, waiting for a place included.
    """

    role: Role
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    trainable: bool
    grammar: str | None = None
    thought: str = ""
    tool_call: ToolCall | None = None
    tool_result: ToolResult | None = None
    format_error: str | None = None
    generate_s: float = 0.0
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout. `answer` is None where the agent gave none."""

    id: str
    group_id: str
    task: Task
    turns: tuple[Turn, ...]
    answer: str | None
    stop_reason: StopReason

    @property
    def planner_turns(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.role == "planner")

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def num_format_errors(self) -> int:
        return sum(turn.format_error is not None for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """A planner turn was cut by the token limit (by finish reason, never by a missing EOS)."""
        return any(turn.completion.finish_reason == "length" for turn in self.planner_turns)

    @property
    def oldest_policy_version(self) -> int | None:
        """None for a trajectory that failed before its first completion."""
        return min((turn.completion.policy_version for turn in self.planner_turns), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """Siblings: G trajectories of one task."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
