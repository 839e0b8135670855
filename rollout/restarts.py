"""Where to go on when all attempts at a task fail: an anchor, the beginning of one of them."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from configs.rollout import FirstCallRestartsConfig, RandomRestartsConfig
from rollout.types import Trajectory, TrajectoryGroup, Turn

Forks = FirstCallRestartsConfig | RandomRestartsConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The first `num_turns` planner turns of the trajectory with this id; `source` says who chose it."""

    trajectory_id: str
    num_turns: int
    source: str


def choose_anchor(group: TrajectoryGroup, config: Forks, *, seed: int) -> Anchor | None:
    """The same for the same group and seed; None where no attempt has a beginning to go on from."""
    places = list(beginnings(group) if isinstance(config, RandomRestartsConfig) else after_first_calls(group))
    if not places:
        return None
    trajectory, num_turns = random.Random(f"anchor|{seed}|{group.id}").choice(places)
    return Anchor(trajectory_id=trajectory.id, num_turns=num_turns, source=config.type)


def as_fork(trajectory: Trajectory, recorded: Sequence[Turn]) -> Trajectory:
    """The planner turns that were taken from the record come first, in its order, and are not to be trained on."""
    places = {id(turn.completion): place for place, turn in enumerate(recorded)}

    def place(turn: Turn) -> int:
        return places.get(id(turn.completion), len(recorded))

    turns = sorted(trajectory.planner_turns, key=place)
    planned = (replace(turn, trainable=turn.trainable and place(turn) == len(recorded)) for turn in turns)
    return replace(
        trajectory, turns=tuple(next(planned) if turn.role == "planner" else turn for turn in trajectory.turns)
    )


def num_new_tokens(forks: Iterable[Trajectory], recorded: Sequence[Turn]) -> int:
    """Those that were sampled, by frozen modules too, and not taken from the record."""
    taken = {id(turn.completion) for turn in recorded}
    turns = (turn for fork in forks for turn in fork.turns if id(turn.completion) not in taken)
    return sum(len(turn.completion.token_ids) for turn in turns)


def repeats(fork: Trajectory, root: Trajectory, num_turns: int) -> bool:
    """Whether the first turns of `fork` are those of `root`: the same prompts led to the same results, up to a prompt
    that the root went on with, too. A planner that the infrastructure stopped before it came there repeats what it has,
    and is unscored as ever; an agent of one's own is also stopped where it asks something else, and repeats nothing."""
    own, recorded = fork.planner_turns, root.planner_turns
    if any(
        one.prompt_token_ids != other.prompt_token_ids or one.tool_result != other.tool_result
        for one, other in zip(own[:num_turns], recorded, strict=False)
    ):
        return False
    if len(own) <= num_turns:
        return fork.stop_reason == "infrastructure" and fork.failure is None
    return own[num_turns].prompt_token_ids in {turn.prompt_token_ids for turn in recorded[num_turns:]}


def most_turns(trajectory: Trajectory) -> int:
    """The longest beginning that leaves a turn to sample: none of it answers."""
    turns = trajectory.planner_turns
    answers = (at for at, turn in enumerate(turns) if turn.tool_call and turn.tool_call.name == "answer")
    return max(0, min(next(answers, len(turns)), len(turns) - 1))


def beginnings(group: TrajectoryGroup) -> Iterator[tuple[Trajectory, int]]:
    """All that leave a turn to sample, as an attempt and a number of its planner turns."""
    for trajectory in group.trajectories:
        yield from ((trajectory, num_turns) for num_turns in range(1, most_turns(trajectory) + 1))


def after_first_calls(group: TrajectoryGroup) -> Iterator[tuple[Trajectory, int]]:
    """Those of them that end with the attempt's first tool call that worked."""
    for trajectory in group.trajectories:
        worked = (at + 1 for at, turn in enumerate(trajectory.planner_turns) if _called(turn))
        num_turns = next(worked, None)
        if num_turns is not None and num_turns <= most_turns(trajectory):
            yield trajectory, num_turns


def _called(turn: Turn) -> bool:
    """A tool, and it worked."""
    call, result = turn.tool_call, turn.tool_result
    return call is not None and call.name != "think" and result is not None and result.error is None
