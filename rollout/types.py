"""The record of acting: completions, turns, trajectories, groups. Each is made once and never changed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeGuard

from envs.types import Task, ToolCall, ToolResult

Role = Literal["planner", "verifier", "generator"]
FinishReason = Literal["stop", "length"]
StopReason = Literal["answered", "verified", "format", "context", "infrastructure"]
SERVED_VERSION = -2
"""The policy version of what a server samples with: whatever it serves under the model's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat, as text."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSwitch:
    """From token `index` of a completion on, this version sampled."""

    index: int
    policy_version: int


def is_answer(text: str | None) -> TypeGuard[str]:
    """False also for a blank text, which an agent of one's own returns where it has no answer."""
    return text is not None and bool(text.strip())


def versions_by_token(num_tokens: int, first: int, switches: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """`first`, and from each switch's index on the version that stands with it."""
    versions = [first] * num_tokens
    for index, version in switches:
        versions[index:] = [version] * (num_tokens - index)
    return tuple(versions)


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
    finish_reason: FinishReason
    policy_version: int
    switches: tuple[VersionSwitch, ...] = ()

    @property
    def token_versions(self) -> tuple[int, ...]:
        """The version that sampled each token."""
        switches = ((switch.index, switch.policy_version) for switch in self.switches)
        return versions_by_token(len(self.token_ids), self.policy_version, switches)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCompletion(Completion):
    """What a server that speaks chat messages tells of one model call: the text, and how many tokens it counted.

    Without token ids and the log-probs they were sampled with nothing can be trained on it, ever.
    """

    token_ids: tuple[int, ...] = field(default=(), init=False)
    logprobs: tuple[float, ...] = field(default=(), init=False)
    policy_version: int = field(default=SERVED_VERSION, init=False)
    num_prompt_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call and the tool result it led to.

    `grammar` is the grammar that constrained the sampling (None: free text, or a server's own way); `tool_call` is
    None for a malformed turn, `format_error` then says why, and for words that an agent of one's own is told. `heard`
    is what such an agent said since the reply that its prompt goes on from, as text; it is None for the planner, who
    hears nothing but its task and results. Seconds are wall time, waiting for a place included; `tool_s` of such an
    agent is what it took from the reply until it asked again, or ended.
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
    heard: str | None = None
    generate_s: float = 0.0
    tool_s: float = 0.0

    @property
    def truncated(self) -> bool:
        """Cut by the token limit: by the finish reason, never by a missing EOS."""
        return self.completion.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout. `answer` is None where the agent gave none. `failure` says in a sentence why it could
    not be scored, where somebody knows."""

    id: str
    group_id: str
    task: Task
    turns: tuple[Turn, ...]
    answer: str | None
    stop_reason: StopReason
    failure: str | None = None

    @property
    def planner_turns(self) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.role == "planner")

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """The planner turns by number, each in one branch: one whose prompt continues all that was said in a branch so
        far goes on with it, the longest where there are several; any other begins one. A dialogue that only grows has
        one branch."""
        branches: list[list[int]] = []
        ends: list[tuple[int, ...]] = []
        for number, turn in enumerate(self.planner_turns):
            prompt = turn.prompt_token_ids
            continued = [at for at, end in enumerate(ends) if prompt[: len(end)] == end]
            at = max(continued, key=lambda at: len(ends[at]), default=len(branches))
            if at == len(branches):
                branches.append([])
                ends.append(())
            branches[at].append(number)
            ends[at] = prompt + turn.completion.token_ids
        return tuple(map(tuple, branches))

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def served(self) -> bool:
        """A server answered, so there are no token ids and no log-probs to train on."""
        return any(isinstance(turn.completion, TextCompletion) for turn in self.planner_turns)

    @property
    def num_format_errors(self) -> int:
        return sum(turn.format_error is not None for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """A planner turn was cut by the token limit."""
        return any(turn.truncated for turn in self.planner_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """Siblings: G trajectories of one task."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
