"""What a train step leaves for the viewer: its groups, trajectory by trajectory, and where advantages came from."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray

from reward.credit import CreditedStep, same_steps, scores_by_action
from reward.stored import VerbatimGroup, VerbatimRecord, verbatim_group
from reward.types import ScoredGroup
from rollout.buffer import Batch
from rollout.types import versions_by_token

DIGITS = 6
"""Of learner log-probs, advantages and scores so many digits after the point are written."""


class StoredGroups(Iterable[VerbatimGroup]):
    """The groups that a reference to their bytes stands for: fetched and parsed in a thread, from the moment that this
    is made, while the learner trains on them. Who asks for them waits until that is done."""

    def __init__(self, payloads: Any) -> None:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="groups")
        self._groups = thread.submit(lambda: tuple(map(verbatim_group, ray.get(payloads))))
        thread.shutdown(wait=False)

    def __iter__(self) -> Iterator[VerbatimGroup]:
        return iter(self._groups.result())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A trajectory's line in trajectories.jsonl, and its fields for those who add up: without tokens, the learner's
    log-probs as arrays (nan: not trained)."""

    line: bytes
    fields: Mapping[str, Any]


def step_records(batch: Batch, groups: Iterable[VerbatimGroup], result: CreditedStep) -> Iterator[StepRecord]:
    """All groups of the step's batch, with the credit that the learner gave, then those few without signal that the
    ledger kept bytes of."""
    for group in groups:
        yield from _batch_records(group, batch, result)
    for verdict, reason, payload in batch.untrained:
        yield from _untrained_records(verbatim_group(payload), batch.step, verdict, reason)


def _batch_records(group: VerbatimGroup, batch: Batch, result: CreditedStep) -> Iterator[StepRecord]:
    scored = group.scored
    parts = result.credit[scored.group.id]
    shared = _verdict(result) | {
        "credit": {
            "scheme": parts.scheme,
            "weight": parts.weight,
            "totals": asdict(parts.totals),
            "scores": asdict(parts.scores),
            "by_action": {
                action: asdict(spread) for action, spread in scores_by_action(scored, parts.step_rewards).items()
            },
        },
    }
    same = same_steps(scored, parts.advantages)
    for index, (record, reward) in enumerate(zip(group.records, scored.rewards, strict=True)):
        more = shared | {
            "outcome": reward.outcome,
            "advantages": _rounded(parts.advantages[index]),
            "outcome_parts": _rounded(parts.outcomes[index]),
            "process_parts": _rounded(parts.processes[index]),
            "step_rewards": _rounded(parts.step_rewards[index]),
            "same_steps": [_rounded(values) for values in same[index]],
        }
        more |= _scores(scored, index)
        logprobs = result.learner_logprobs.get(record.fields["id"])
        yield _step_record(record, batch.step, more, _turn_logprobs(record, logprobs, batch.version_ages))


def _untrained_records(group: VerbatimGroup, step: int, verdict: str, reason: str) -> Iterator[StepRecord]:
    for index, (record, reward) in enumerate(zip(group.records, group.scored.rewards, strict=True)):
        more = {"verdict": verdict, "reason": reason, "outcome": reward.outcome} | _scores(group.scored, index)
        yield _step_record(record, step, more, [None] * len(record.fields["turns"]))


def _step_record(
    record: VerbatimRecord, step: int, more: Mapping[str, Any], learner: Sequence[np.ndarray | None]
) -> StepRecord:
    """`learner`: its log-probs for each turn, None where it has none."""
    head = {name: value for name, value in record.fields.items() if name != "turns"} | {"step": step, **more}
    texts = [b"" if values is None else b', "learner_logprobs": ' + _numbers(values) for values in learner]
    turns = [
        turn if values is None else turn | {"learner_logprobs": values}
        for turn, values in zip(record.fields["turns"], learner, strict=True)
    ]
    return StepRecord(line=record.line(head, texts), fields={**head, "turns": turns})


def _turn_logprobs(
    record: VerbatimRecord, logprobs: np.ndarray | None, version_ages: Mapping[int, int]
) -> list[np.ndarray | None]:
    """The learner's for each turn, nan at tokens that were not trained: too old. None for turns that are not the
    planner's."""
    found: list[np.ndarray | None] = []
    at = 0
    for turn in record.fields["turns"]:
        if logprobs is None or turn["role"] != "planner" or not turn["trainable"]:
            found.append(None)
            continue
        num = len(turn["logprobs"])
        values = np.full(num, np.nan)
        if turn["switches"]:
            versions = versions_by_token(num, turn["policy_version"], turn["switches"])
            trained = np.flatnonzero([version in version_ages for version in versions])
        else:
            trained = np.arange(num if turn["policy_version"] in version_ages else 0)
        own = logprobs[at : at + len(trained)]
        values[trained[: len(own)]] = own
        at += len(own)
        found.append(values)
    return found


def _numbers(values: np.ndarray) -> bytes:
    """As JSON, null where there is none."""
    if np.isfinite(values).all():
        return f"[{', '.join([f'%.{DIGITS}f'] * len(values)) % tuple(values.tolist())}]".encode()
    return json.dumps([None if np.isnan(value) else round(value, DIGITS) for value in values.tolist()]).encode()


def _verdict(result: CreditedStep) -> dict[str, Any]:
    """What became of the batch: the version that it was trained into, or why the guard refused it."""
    if result.skipped is None:
        return {"verdict": "trained", "trained_as": result.policy_version}
    return {"verdict": "refused", "reason": result.skipped}


def _scores(scored: ScoredGroup, index: int) -> dict[str, Any]:
    """Of the trajectory at `index`; nothing for a group that no PRM has scored."""
    scores = scored.step_scores
    return {} if scores is None else {"prm_scores": list(scores.raw[index]), "prm_digest": scores.prm_digest}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]
