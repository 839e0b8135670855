"""Groups and trajectories as bytes: msgpack between processes, one JSON object per line in files.

An encoded prompt leaves out what repeats the planner turn before it: each dialogue is stored once.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from configs.errors import UserError, in_whole_letters
from rollout.files import whole_lines
from rollout.types import Group, Trajectory, Turn, floats_of, ids_of

Value = TypeVar("Value")
Record: TypeAlias = dict[str, Any]
"""A trajectory as `flat_record` shows it."""

_pack, _dump = msgspec.msgpack.Encoder(), msgspec.json.Encoder()
_unpack_group, _load_group = msgspec.msgpack.Decoder(Group), msgspec.json.Decoder(Group)
_load_trajectory = msgspec.json.Decoder(Trajectory)


class SchemaError(UserError):
    """A group or trajectory that another version of the package wrote, or that was damaged."""


def encode_group(group: Group) -> bytes:
    """Return a group as msgpack."""
    return _encoded(_pack.encode, _shortened_group(group))


def group_line(group: Group) -> bytes:
    """Return a group as one line of JSON."""
    return _encoded(_dump.encode, _shortened_group(group)) + b"\n"


def trajectory_line(trajectory: Trajectory) -> bytes:
    """Return a trajectory as one line of JSON."""
    return _encoded(_dump.encode, _shortened(trajectory)) + b"\n"


def decode_group(data: bytes) -> Group:
    """Return the group that `encode_group` encoded. Raises SchemaError."""
    return _restored_group(_decoded(_unpack_group.decode, data))


def group_of(line: bytes) -> Group:
    """Return the group that `group_line` encoded. Raises SchemaError."""
    return _restored_group(_decoded(_load_group.decode, line))


def trajectory_of(line: bytes) -> Trajectory:
    """Return the trajectory that `trajectory_line` encoded. Raises SchemaError."""
    return _restored(_decoded(_load_trajectory.decode, line))


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file without a last line that a crash cut off. Raises UserError."""
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            yield trajectory_of(line)
        except SchemaError as error:
            raise UserError(f"'{path}', line {number}: {error}") from error


def flat_record(trajectory: Trajectory) -> Record:
    """Return a trajectory as a flat dictionary of plain values, which pages and evaluations show.

    Lists of numbers take the place of bytes, and each turn shows only what is new in its prompt.
    """
    short, task, planned = _shortened(trajectory), trajectory.task, trajectory.planner_turns
    versions = [version for turn in planned for version in turn.token_versions]
    record: Record = {
        **_named(trajectory, "id", "group_id", "phase", "step", "answer", "stop_reason", "failure", "outcome"),
        "task_id": task.id,
        "dataset": task.dataset,
        "question": task.question,
        "gold": task.answer,
        "reward": trajectory.total,
        "num_turns": len(planned),
        "num_tokens": trajectory.num_sampled_tokens,
        "versions": [min(versions), max(versions)] if versions else None,
        "turns": [_flat_turn(turn) for turn in short.turns],
    }
    if trajectory.verdict is not None:
        record |= _named(trajectory, "verdict", "reason")
    if trajectory.trained_as is not None:
        record |= _named(trajectory, "trained_as")
    if trajectory.prm_digest is not None:
        record |= {"prm_digest": trajectory.prm_digest}
    if any(turn.score is not None for turn in planned):
        record |= {"prm_scores": [turn.score for turn in planned]}
    if any(turn.num_candidates > 1 for turn in planned):
        record |= {"num_candidates": [turn.num_candidates for turn in planned]}
    if trajectory.credit is not None:
        record |= {
            "credit": msgspec.to_builtins(trajectory.credit),
            "advantages": [turn.advantage for turn in planned],
            "same_steps": [list(turn.same_steps) for turn in planned],
        }
    return record


def _flat_turn(turn: Turn) -> Record:
    call, result = turn.tool_call, turn.tool_result
    flat: Record = {
        **_named(turn, "role", "thought", "format_error", "heard", "text", "finish_reason", "policy_version"),
        **_named(turn, "switches", "generate_s", "tool_s", "trainable", "grammar", "served"),
        "action": call.name if call else None,
        "action_input": call.arguments if call else None,
        "result": result.text if result else None,
        "tool_error": result.error if result else None,
        "prompt_tokens": turn.prompt_start + len(turn.prompt) // 4,
        "continues": turn.prompt_start > 0,
        "prompt_token_ids": ids_of(turn.prompt).tolist(),
        "token_ids": ids_of(turn.tokens).tolist(),
        "logprobs": floats_of(turn.logprobs).tolist(),
    }
    if turn.learner_logprobs is not None:
        numbers = floats_of(turn.learner_logprobs).tolist()
        flat["learner_logprobs"] = [None if number != number else number for number in numbers]
    return flat


def _named(source: object, *names: str) -> Record:
    return {name: getattr(source, name) for name in names}


def _shortened(trajectory: Trajectory) -> Trajectory:
    turns, before = list(trajectory.turns), b""
    for index, turn in enumerate(trajectory.turns):
        if turn.role == "planner":
            if before and turn.prompt.startswith(before):
                turns[index] = replace(turn, prompt=turn.prompt[len(before) :], prompt_start=len(before) // 4)
            before = turn.dialogue
    return replace(trajectory, turns=tuple(turns))


def _shortened_group(group: Group) -> Group:
    return replace(group, trajectories=tuple(map(_shortened, group.trajectories)))


def _restored(trajectory: Trajectory) -> Trajectory:
    before = b""
    for turn in trajectory.turns:
        if turn.prompt_start:
            turn.prompt, turn.prompt_start = before + turn.prompt, 0
        if turn.role == "planner":
            before = turn.dialogue
    return trajectory


def _restored_group(group: Group) -> Group:
    for trajectory in group.trajectories:
        _restored(trajectory)
    return group


def _encoded(encode: Callable[[object], bytes], value: object) -> bytes:
    try:
        return encode(value)
    except UnicodeEncodeError:
        # Half a surrogate pair, which a model may write, has no UTF-8; it becomes a question mark.
        return encode(in_whole_letters(msgspec.to_builtins(value, builtin_types=(bytes,))))


def _decoded(decode: Callable[[bytes], Value], data: bytes) -> Value:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"this is no record of schema {Trajectory.__struct_config__.tag}: {error}") from error
