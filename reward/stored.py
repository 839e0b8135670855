"""Scored groups as bytes for the ledger: what was judged, then each trajectory as a line of `rollout.records`."""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from reward.types import Reward, ScoredGroup, StepScores
from rollout.records import exact_line, trajectory_of, trajectory_record
from rollout.store.ledger_file import LedgerError
from rollout.types import TrajectoryGroup

SCHEMA = 3
"""Schema 1 has numbers as plain lists, schema 2 all of a group as one value; both are read as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group as the ledger has it: its judgement is parsed, its trajectories are lines (`exact_line`) that stay as
    they were written. The fields are those of a `ScoredGroup`."""

    id: str
    lines: tuple[bytes, ...]
    rewards: tuple[Reward, ...]
    step_scores: StepScores | None

    @classmethod
    def of(cls, data: bytes) -> "StoredGroup":
        """What `stored_group` wrote. Raises ValueError for another schema, LedgerError when its bytes changed."""
        try:
            head, _, rest = zlib.decompress(data).partition(b"\n")
        except zlib.error as error:
            raise LedgerError(
                f"the disk has changed the bytes of a group in the ledger ({error}); a resume fails this group and "
                "goes on"
            ) from error
        facts = json.loads(head)
        if not 1 <= facts["schema"] <= SCHEMA:
            raise ValueError(f"a stored group has schema {facts['schema']}, this version reads 1 to {SCHEMA}")
        return cls._of(facts, iter(rest.splitlines(keepends=True)))

    @classmethod
    def _of(cls, facts: Mapping[str, Any], lines: Iterator[bytes]) -> "StoredGroup":
        rewards = tuple(Reward(**reward) for reward in facts["rewards"])
        earlier = map(exact_line, facts.get("trajectories", ()))
        scores = facts["step_scores"]
        return cls(
            id=facts["group_id"],
            lines=tuple(earlier) or tuple(islice(lines, len(rewards))),
            rewards=rewards,
            step_scores=None
            if scores is None
            else StepScores(raw=tuple(map(tuple, scores["raw"])), prm_digest=scores["prm_digest"]),
        )

    def scored(self) -> ScoredGroup:
        """With every trajectory parsed."""
        trajectories = tuple(trajectory_of(json.loads(line)) for line in self.lines)
        return ScoredGroup(
            group=TrajectoryGroup(id=self.id, task=trajectories[0].task, trajectories=trajectories),
            rewards=self.rewards,
            step_scores=self.step_scores,
        )


def stored_group(scored: ScoredGroup) -> bytes:
    """Lines of JSON, compressed: readable without this code, and nothing in it runs when it is read."""
    head = json.dumps({"schema": SCHEMA, **_facts(scored)}).encode()
    return zlib.compress(b"".join((head, b"\n", *_lines(scored))), level=1)


def _facts(scored: ScoredGroup) -> dict[str, Any]:
    scores = scored.step_scores
    facts: dict[str, Any] = {
        "group_id": scored.group.id,
        "rewards": [{"outcome": one.outcome, "total": one.total, "parts": dict(one.parts)} for one in scored.rewards],
        "step_scores": None if scores is None else {"raw": scores.raw, "prm_digest": scores.prm_digest},
    }
    return facts


def _lines(scored: ScoredGroup) -> Iterator[bytes]:
    for trajectory, reward in zip(scored.group.trajectories, scored.rewards, strict=True):
        yield exact_line(trajectory_record(trajectory, reward=reward.total, phase="train", step=None))


def is_readable(data: bytes) -> bool:
    """Whether these are the very bytes that `stored_group` wrote: zlib keeps a checksum of them."""
    try:
        zlib.decompress(data)
    except zlib.error:
        return False
    return True


def scored_group_of(data: bytes) -> ScoredGroup:
    """The group that `stored_group` wrote. Raises ValueError for another schema, LedgerError when its bytes changed."""
    return StoredGroup.of(data).scored()
