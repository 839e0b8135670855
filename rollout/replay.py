"""Replays of a recorded attempt: the first turns come from the record, the rest is sampled."""

from collections.abc import Sequence

from msgspec.structs import replace

from rollout.types import Trajectory, Turn


def as_replay(trajectory: Trajectory, recorded: Sequence[Turn]) -> Trajectory:
    """Return the trajectory with the recorded planner turns first, in the order of the record, and not trainable."""
    places = {(turn.prompt, turn.tokens, turn.logprobs): place for place, turn in enumerate(recorded)}

    def place(turn: Turn) -> int:
        return places.get((turn.prompt, turn.tokens, turn.logprobs), len(recorded))

    ordered = sorted(trajectory.planner_turns, key=place)
    planned = (replace(turn, trainable=turn.trainable and place(turn) == len(recorded)) for turn in ordered)
    return replace(
        trajectory, turns=tuple(next(planned) if turn.role == "planner" else turn for turn in trajectory.turns)
    )


def repeats(replay: Trajectory, original: Trajectory, num_turns: int) -> bool:
    """Return whether the first planner turns of `replay` equal those of `original`.

    The same prompts must have led to the same results, up to a prompt that the original continued with as well. A
    planner that an infrastructure fault stopped earlier repeats what it has; a custom agent that was stopped because it
    asked something else repeats nothing.
    """
    turns, recorded = replay.planner_turns, original.planner_turns
    if any(
        turn.prompt != other.prompt or turn.tool_result != other.tool_result
        for turn, other in zip(turns[:num_turns], recorded, strict=False)
    ):
        return False
    if len(turns) <= num_turns:
        return replay.stop_reason == "infrastructure" and replay.failure is None
    return turns[num_turns].prompt in {turn.prompt for turn in recorded[num_turns:]}
