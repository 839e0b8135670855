"""Scored groups as bytes for the ledger, and records that pass through unread."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from reward.types import Reward, ScoredGroup, StepScores
from rollout.records import TURNS, trajectory_of, trajectory_record
from rollout.store.ledger_file import LedgerError
from rollout.types import TrajectoryGroup

_NUMBERS = re.compile(rb'"(prompt_token_ids|token_ids|logprobs)": \[([^\]]*)\]')
_RECORD = re.compile(rb'\{"id": "')


@dataclass(frozen=True, slots=True)
class NumberText:
    """Numbers as they stand in JSON, which are parsed when somebody wants them."""

    text: bytes

    def __len__(self) -> int:
        return self.text.count(b",") + 1 if self.text else 0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(json.loads(b"[%b]" % self.text), dtype=dtype or np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbatimRecord:
    """A trajectory as JSON. `fields` are those of `trajectory_record`, without tokens; the log-probs of each turn are
    a `NumberText`. `turns` is the text of its turns, cut behind the log-probs of each."""

    fields: dict[str, Any]
    turns: tuple[bytes, ...]

    def line(self, head: dict[str, Any], more: Sequence[bytes]) -> bytes:
        """The trajectory as a line with these fields before its turns. `more`: text for each turn, behind its
        log-probs."""
        parts = [json.dumps(head, ensure_ascii=False).encode(errors="replace")[:-1], TURNS, self.turns[0]]
        for text, rest in zip(more, self.turns[1:], strict=True):
            parts += (text, rest)
        return b"".join((*parts, b"]}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbatimGroup:
    """`scored` has no completion tokens, and in the place of each prompt one number that stands for its tokens: equal
    prompts have equal ones."""

    scored: ScoredGroup
    records: tuple[VerbatimRecord, ...]


def verbatim_group(data: bytes) -> VerbatimGroup:
    """The group that `stored_group` wrote. Raises ValueError for another schema."""
    text = zlib.decompress(data)
    if rb"\u" in text:
        # Half a surrogate pair, which a model may write, has no UTF-8; it becomes a question mark.
        text = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")
    numbers = list(_NUMBERS.finditer(text))
    gaps = pairwise([0, *(edge for match in numbers for edge in match.span(2)), len(text)])
    record = json.loads(b"".join(text[start:stop] for start, stop in islice(gaps, 0, None, 2)))
    if record["schema"] != SCHEMA:
        raise ValueError(f"a stored group has schema {record['schema']}, this version reads {SCHEMA}")
    begins = [match.start() for match in _RECORD.finditer(text)]
    ends = [*begins[1:], text.rfind(b', "rewards": [')]
    own = _by_trajectory(record["trajectories"], numbers)
    for fields, matches in zip(record["trajectories"], own, strict=True):
        _name_prompts(fields["turns"], matches)
    scored, records = scored_group_of_record(record), []
    for fields, matches, begin, end in zip(record["trajectories"], own, begins, ends, strict=True):
        for turn, (_, _, logprobs) in zip(fields["turns"], matches, strict=True):
            turn["logprobs"] = NumberText(logprobs[2])
        cuts = (logprobs.end() for _, _, logprobs in matches)
        edges = [text.index(TURNS, begin) + len(TURNS), *cuts, text.rindex(b"]}", begin, end)]
        turns = tuple(text[start:stop] for start, stop in pairwise(edges))
        records.append(VerbatimRecord(fields=fields, turns=turns))
    return VerbatimGroup(scored=scored, records=tuple(records))


def _by_trajectory(
    trajectories: Sequence[Mapping[str, Any]], numbers: Sequence[re.Match[bytes]]
) -> list[list[tuple[re.Match[bytes], ...]]]:
    """The lists of each turn: of its prompt, its tokens and its log-probs, in this order."""
    turns = zip(*(iter(numbers),) * 3, strict=True)
    return [list(islice(turns, len(one["turns"]))) for one in trajectories]


def _name_prompts(turns: list[dict[str, Any]], numbers: Sequence[tuple[re.Match[bytes], ...]]) -> None:
    """A number in the place of each whole prompt."""
    so_far = b""
    for turn, (prompt, tokens, _) in zip(turns, numbers, strict=True):
        whole = _joined(so_far, prompt[2]) if turn["continues"] else prompt[2]
        turn |= {"prompt_token_ids": [hash(whole)], "continues": False}
        if turn["role"] == "planner":
            so_far = _joined(whole, tokens[2])


def _joined(one: bytes, other: bytes) -> bytes:
    return b", ".join(part for part in (one, other) if part)


SCHEMA = 1


def stored_group(scored: ScoredGroup) -> bytes:
    """JSON, compressed: readable without this code, and nothing in it runs when it is read."""
    group, scores = scored.group, scored.step_scores
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "group_id": group.id,
        "trajectories": [
            trajectory_record(one, reward=reward.total, phase="train", step=None)
            for one, reward in zip(group.trajectories, scored.rewards, strict=True)
        ],
        "rewards": [{"outcome": one.outcome, "total": one.total, "parts": dict(one.parts)} for one in scored.rewards],
        "step_scores": None if scores is None else {"raw": scores.raw, "prm_digest": scores.prm_digest},
    }
    return zlib.compress(json.dumps(record).encode(), level=1)


def is_readable(data: bytes) -> bool:
    """Whether these are the very bytes that `stored_group` wrote: zlib keeps a checksum of them."""
    try:
        zlib.decompress(data)
    except zlib.error:
        return False
    return True


def scored_group_of(data: bytes) -> ScoredGroup:
    """The group that `stored_group` wrote. Raises ValueError for another schema, LedgerError when its bytes changed."""
    try:
        record = json.loads(zlib.decompress(data))
    except zlib.error as error:
        raise LedgerError(
            f"the disk has changed the bytes of a group in the ledger ({error}); a resume fails this group and goes on"
        ) from error
    if record["schema"] != SCHEMA:
        raise ValueError(f"a stored group has schema {record['schema']}, this version reads {SCHEMA}")
    return scored_group_of_record(record)


def scored_group_of_record(record: Mapping[str, Any]) -> ScoredGroup:
    """The group in a record that was parsed."""
    trajectories = tuple(map(trajectory_of, record["trajectories"]))
    scores = record["step_scores"]
    return ScoredGroup(
        group=TrajectoryGroup(id=record["group_id"], task=trajectories[0].task, trajectories=trajectories),
        rewards=tuple(Reward(**reward) for reward in record["rewards"]),
        step_scores=None
        if scores is None
        else StepScores(raw=tuple(map(tuple, scores["raw"])), prm_digest=scores["prm_digest"]),
    )
