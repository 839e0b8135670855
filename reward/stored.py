"""Scored groups as bytes for the ledger."""

import json
import zlib
from dataclasses import asdict
from typing import Any

from reward.types import Reward, ScoredGroup, StepScores
from rollout.records import trajectory_of, trajectory_record
from rollout.restarts import Anchor
from rollout.store.ledger_file import LedgerError
from rollout.types import TrajectoryGroup

SCHEMA = 2
"""Schema 1 has numbers as plain lists, and is read as well."""


def stored_group(scored: ScoredGroup) -> bytes:
    """JSON, compressed: readable without this code, and nothing in it runs when it is read."""
    return zlib.compress(json.dumps({"schema": SCHEMA, **_record_of(scored)}).encode(), level=1)


def _record_of(scored: ScoredGroup) -> dict[str, Any]:
    group, scores = scored.group, scored.step_scores
    record: dict[str, Any] = {
        "group_id": group.id,
        "trajectories": [
            trajectory_record(one, reward=reward.total, phase="train", step=None)
            for one, reward in zip(group.trajectories, scored.rewards, strict=True)
        ],
        "rewards": [{"outcome": one.outcome, "total": one.total, "parts": dict(one.parts)} for one in scored.rewards],
        "step_scores": None if scores is None else {"raw": scores.raw, "prm_digest": scores.prm_digest},
    }
    if scored.anchor is not None and scored.roots is not None:
        record |= {"anchor": asdict(scored.anchor), "roots": _record_of(scored.roots)}
    return record


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
    if not 1 <= record["schema"] <= SCHEMA:
        raise ValueError(f"a stored group has schema {record['schema']}, this version reads 1 to {SCHEMA}")
    return _scored_of(record)


def _scored_of(record: dict[str, Any]) -> ScoredGroup:
    trajectories = tuple(map(trajectory_of, record["trajectories"]))
    scores, forked = record["step_scores"], "anchor" in record
    return ScoredGroup(
        group=TrajectoryGroup(id=record["group_id"], task=trajectories[0].task, trajectories=trajectories),
        rewards=tuple(Reward(**reward) for reward in record["rewards"]),
        step_scores=None
        if scores is None
        else StepScores(raw=tuple(map(tuple, scores["raw"])), prm_digest=scores["prm_digest"]),
        anchor=Anchor(**record["anchor"]) if forked else None,
        roots=_scored_of(record["roots"]) if forked else None,
    )
