"""Trajectories as JSON lines, for reading why a step got its reward.

A line is a head, then its turns, then what the learner said of their tokens. The head is short, so that a reader can
list a long file without reading what was said in it, and turns are taken over from one file to another as bytes.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np

from configs.errors import UserError
from envs.types import Task, ToolCall, ToolResult
from rollout.numbers import packed, unpacked
from rollout.store.disk import named
from rollout.types import Completion, FinishReason, Role, StopReason, TextCompletion, Trajectory, Turn, VersionSwitch

TOKENIZER = "tokenizer.json"
"""Stands beside the records: with it their token ids can be read."""

PACKED = ("prompt_token_ids", "token_ids", "logprobs", "learner_logprobs")
"""The fields of a turn whose numbers are packed (`rollout.numbers`)."""

TURNS = b', "turns": ['
"""Ends the head of a line where it stands last: a task may have such a field among its `metadata`, a turn has none, and
within a text every quotation mark has a backslash before it."""

LEARNER = b', "learner_logprobs": ['
"""Ends the turns of a line, where it is there. The field has a packed string for each turn, None for one that was not
trained."""


class RecordsError(UserError):
    """A file of records that cannot be read; the message names the line."""


Parsed = TypeVar("Parsed")
Numbers: TypeAlias = str | list[int] | list[float]
"""Packed (`rollout.numbers`), or a plain list, as earlier releases wrote them."""


class Scoring(TypedDict):
    """What a task has beyond those of the built-in data sets."""

    scorer: str | None
    scoring_limit_s: float
    metadata: dict[str, object]


class Served(TypedDict):
    """The tokens of a call as a server counted them."""

    num_prompt_tokens: int
    num_tokens: int


class TurnRecord(TypedDict):
    """A turn (`rollout.types.Turn`) in JSON. `prompt_tokens` counts the whole prompt; where it `continues` what was
    said before, `prompt_token_ids` are those after it. `switches` are pairs of an index and the version from there."""

    role: Role
    thought: str
    action: str | None
    action_input: str | None
    result: str | None
    tool_error: str | None
    foreign: NotRequired[bool]
    format_error: str | None
    heard: NotRequired[str | None]
    text: str
    finish_reason: FinishReason
    policy_version: int
    switches: list[list[int]]
    generate_s: float
    tool_s: float
    trainable: bool
    grammar: str | None
    prompt_tokens: int
    continues: bool
    prompt_token_ids: Numbers
    token_ids: Numbers
    logprobs: Numbers
    learner_logprobs: NotRequired[Numbers]
    served: NotRequired[Served | None]


class RecordHead(TypedDict):
    """What is known of a trajectory besides its turns. `versions` are the oldest and the newest that sampled of it."""

    id: str
    group_id: str
    phase: str
    step: int | None
    task_id: str
    dataset: str
    question: str
    gold: str
    scoring: NotRequired[Scoring]
    answer: str | None
    stop_reason: StopReason
    failure: NotRequired[str | None]
    reward: float | None
    num_turns: int
    num_tokens: int
    versions: list[int] | None


class TrajectoryRecord(RecordHead):
    turns: list[TurnRecord]


class StepFields(TypedDict, total=False):
    """What a train step adds to a head. `verdict` says what became of the group, `reason` why it was not trained.
    Lists have an entry for each planner turn; None is a turn without a value. `same_steps` are the advantages of all
    attempts that made this very step."""

    verdict: str
    reason: str
    trained_as: int
    outcome: float | None
    credit: dict[str, object]
    advantages: list[float | None]
    outcome_parts: list[float | None]
    process_parts: list[float | None]
    step_rewards: list[float | None]
    same_steps: list[list[float | None]]
    prm_scores: list[float | None]
    prm_digest: str


class StepHead(StepFields, RecordHead):
    pass


class StepRecord(StepHead, TrajectoryRecord):
    pass


def trajectory_record(
    trajectory: Trajectory, *, reward: float | None, phase: str, step: int | None
) -> TrajectoryRecord:
    """Everything known of a trajectory, ready for JSON; tokens and log-probs are packed (`rollout.numbers`). `reward`
    None: it could not be scored."""
    task = trajectory.task
    versions = [version for turn in trajectory.planner_turns for version in turn.completion.token_versions]
    head: RecordHead = {
        "id": trajectory.id,
        "group_id": trajectory.group_id,
        "phase": phase,
        "step": step,
        "task_id": task.id,
        "dataset": task.dataset,
        "question": task.question,
        "gold": task.answer,
        "answer": trajectory.answer,
        "stop_reason": trajectory.stop_reason,
        "failure": trajectory.failure,
        "reward": reward,
        "num_turns": len(trajectory.planner_turns),
        "num_tokens": trajectory.num_sampled_tokens,
        "versions": [min(versions), max(versions)] if versions else None,
    }
    if task.scorer is not None or task.metadata:
        metadata = dict(task.metadata)
        head["scoring"] = {"scorer": task.scorer, "scoring_limit_s": task.scoring_limit_s, "metadata": metadata}
    turns = zip(trajectory.turns, _planner_turns_before(trajectory), strict=True)
    return {**head, "turns": [_turn_record(turn, before) for turn, before in turns]}


def trajectory_of(record: TrajectoryRecord) -> Trajectory:
    """The trajectory that `trajectory_record` wrote down; log-probs to the last bit. Numbers may
    stand in plain lists, as earlier releases wrote them."""
    turns: list[Turn] = []
    so_far: tuple[int, ...] = ()
    for row in record["turns"]:
        turn = _turn_of(row, so_far)
        turns.append(turn)
        if turn.role == "planner":
            so_far = turn.prompt_token_ids + turn.completion.token_ids
    task = Task(id=record["task_id"], dataset=record["dataset"], question=record["question"], answer=record["gold"])
    if scoring := record.get("scoring"):
        task = replace(task, **scoring)
    return Trajectory(
        id=record["id"],
        group_id=record["group_id"],
        task=task,
        turns=tuple(turns),
        answer=record["answer"],
        stop_reason=record["stop_reason"],
        # Records of earlier runs do not have the field: nobody knew.
        failure=record.get("failure"),
    )


def readable(record: dict[str, Any]) -> dict[str, Any]:
    """The record with plain lists in the place of packed numbers, and the learner's log-probs within the turns; None
    where there is none."""
    _add_logprobs(record["turns"], record.pop("learner_logprobs", ()))
    for turn in record["turns"]:
        for name in PACKED:
            if isinstance(turn.get(name), str):
                numbers = unpacked(turn[name])
                turn[name] = [None if number != number else number for number in numbers.tolist()]
    return record


def _add_logprobs(turns: Sequence[TurnRecord], of_learner: Sequence[str | None]) -> None:
    """Where earlier releases wrote them, and readers look for them."""
    for turn, logprobs in zip(turns, of_learner, strict=False):
        if logprobs is not None:
            turn["learner_logprobs"] = logprobs


def head_of(line: bytes) -> dict[str, Any]:
    """What stands in a line before its turns."""
    end = line.rfind(TURNS)
    return _object(line if end < 0 else line[:end] + b"}")


def _object(line: bytes) -> dict[str, Any]:
    """Raises ValueError."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__}")
    return record


def line_of(record: Mapping[str, object]) -> bytes:
    """With its end. Half a surrogate pair, which a model may write, has no UTF-8; it becomes a question mark."""
    return _dumped(record) + b"\n"


@dataclass(frozen=True, slots=True)
class RecordLine:
    """A line in two parts: the `head` for reading and changing, the `turns` as they stand in the file, from their
    brackets' opening to their closing. `learner_logprobs` are packed, one string for each turn or None."""

    head: StepHead
    turns: bytes
    learner_logprobs: Sequence[str | None] | None = None

    @classmethod
    def of(cls, line: bytes) -> "RecordLine":
        """Of a line that `exact_line` made."""
        end = line.rindex(TURNS)
        return cls(head=json.loads(line[:end] + b"}"), turns=line[end + len(TURNS) - 1 : line.rindex(b"}")])

    def line(self) -> bytes:
        """As `line_of` the record."""
        turns = self.turns if HALF not in self.turns else _dumped(json.loads(self.turns))
        parts = [_dumped(self.head)[:-1], TURNS[:-1], turns]
        if self.learner_logprobs is not None:
            parts += [LEARNER[:-1], _dumped(self.learner_logprobs)]
        return b"".join((*parts, b"}\n"))

    def record(self) -> StepRecord:
        """All of it, parsed."""
        turns: list[TurnRecord] = json.loads(self.turns)
        _add_logprobs(turns, self.learner_logprobs or ())
        return {**self.head, "turns": turns}


HALF = b"\\ud"
"""Stands in every half of a surrogate pair, and in next to nothing else."""


def exact_line(record: Mapping[str, object]) -> bytes:
    """With its end; as `line_of`, but half a surrogate pair is kept, by its number."""
    return json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def append_record(path: Path, record: Mapping[str, object]) -> None:
    """One line, flushed before it returns. A line that a crash cut off before is taken away first, so that the new
    one does not become its end. Raises OSError, which names the file."""
    with named(path), path.open("ab+") as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read(size).rfind(b"\n") + 1)
        file.write(line_of(record))


def read_records(path: Path) -> Iterator[Any]:
    """The records of a file, whose type the caller knows; a last line that was cut off by a crash is left out. Raises
    RecordsError."""
    yield from (record for _, record in _parsed(path, _object))


def read_heads(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """As `read_records`, each line of a file of trajectories with its head."""
    yield from _parsed(path, head_of)


def read_json(path: Path) -> dict[str, Any]:
    """A file that is one JSON object. Raises RecordsError where it is none."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RecordsError(
            f"'{path}' is no JSON object: it was damaged after it was written; put the file back from a copy"
        )
    return found


def _parsed(path: Path, parse: Callable[[bytes], Parsed]) -> Iterator[tuple[bytes, Parsed]]:
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            record = parse(line)
        except ValueError:
            raise RecordsError(
                f"'{path}', line {number}, is no JSON object: it was damaged after it was written; put the file back "
                "from a copy, or delete that line"
            ) from None
        yield line, record


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, each with its end; a last one that was cut off by a crash is left out."""
    with path.open("rb") as lines:
        yield from (line for line in lines if line.endswith(b"\n"))


def _planner_turns_before(trajectory: Trajectory) -> Iterator[tuple[int, ...]]:
    """For each turn, the tokens up to the end of the planner turn before it."""
    so_far: tuple[int, ...] = ()
    for turn in trajectory.turns:
        yield so_far
        if turn.role == "planner":
            so_far = turn.prompt_token_ids + turn.completion.token_ids


def _turn_record(turn: Turn, before: tuple[int, ...]) -> TurnRecord:
    """`before` is left out of the prompt where the prompt continues it; most do, and a record stays short."""
    call, result, completion = turn.tool_call, turn.tool_result, turn.completion
    served: Served | None = None
    if isinstance(completion, TextCompletion):
        served = {"num_prompt_tokens": completion.num_prompt_tokens, "num_tokens": completion.num_tokens}
    continues = turn.role == "planner" and turn.prompt_token_ids[: len(before)] == before
    return {
        "role": turn.role,
        "thought": turn.thought,
        "action": call.name if call else None,
        "action_input": call.arguments if call else None,
        "result": result.text if result else None,
        "tool_error": result.error if result else None,
        "foreign": result.foreign if result else False,
        "format_error": turn.format_error,
        "heard": turn.heard,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "switches": [[switch.index, switch.policy_version] for switch in completion.switches],
        "generate_s": turn.generate_s,
        "tool_s": turn.tool_s,
        "trainable": turn.trainable,
        "grammar": turn.grammar,
        "prompt_tokens": len(turn.prompt_token_ids),
        "continues": continues,
        "prompt_token_ids": packed(turn.prompt_token_ids[len(before) if continues else 0 :]),
        "token_ids": packed(completion.token_ids),
        "logprobs": packed(completion.logprobs),
        "served": served,
    }


def _turn_of(row: TurnRecord, before: tuple[int, ...]) -> Turn:
    call = None if row["action"] is None else ToolCall(name=row["action"], arguments=row["action_input"] or "")
    result = None
    if row["result"] is not None:
        # Records of earlier runs do not have the field: all their tools were of this machine.
        result = ToolResult(text=row["result"], error=row["tool_error"], foreign=row.get("foreign", False))
    return Turn(
        role=row["role"],
        prompt_token_ids=(before if row["continues"] else ()) + _whole(row["prompt_token_ids"]),
        completion=_completion_of(row),
        trainable=row["trainable"],
        grammar=row["grammar"],
        thought=row["thought"],
        tool_call=call,
        tool_result=result,
        format_error=row["format_error"],
        # Records of earlier runs do not have the field: nobody read what agents of one's own say.
        heard=row.get("heard"),
        generate_s=row["generate_s"],
        tool_s=row["tool_s"],
    )


def _whole(numbers: Numbers) -> tuple[int, ...]:
    return tuple(unpacked(numbers).astype(np.int64).tolist())


def _completion_of(row: TurnRecord) -> Completion:
    # Records of earlier runs do not have the field: everything was sampled by the run itself.
    if counts := row.get("served"):
        return TextCompletion(text=row["text"], finish_reason=row["finish_reason"], **counts)
    return Completion(
        token_ids=_whole(row["token_ids"]),
        logprobs=tuple(unpacked(row["logprobs"]).tolist()),
        text=row["text"],
        finish_reason=row["finish_reason"],
        policy_version=row["policy_version"],
        switches=tuple(VersionSwitch(index=index, policy_version=version) for index, version in row["switches"]),
    )
