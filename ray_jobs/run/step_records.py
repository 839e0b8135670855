"""What a train step leaves for the viewer: its groups, trajectory by trajectory, and where advantages came from."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import ray

from reward.credit import CreditedStep
from reward.stored import StoredGroup
from rollout.buffer import Batch
from rollout.records import RecordLine, StepFields, StepHead

DIGITS = 6
"""Of advantages and scores so many digits after the point are written."""


class StepGroups(Iterable[bytes]):
    """The groups that a reference to their bytes stands for, fetched in a thread from the moment that this is made,
    while the learner trains on them. Who asks for them waits until that is done."""

    def __init__(self, payloads: "ray.ObjectRef[tuple[bytes, ...]]") -> None:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="groups")
        self._payloads = thread.submit(ray.get, payloads)
        thread.shutdown(wait=False)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._payloads.result())


def step_records(batch: Batch, payloads: Iterable[bytes], result: CreditedStep) -> Iterator[RecordLine]:
    """All groups of the step's batch, with the credit that the learner gave, then those few without signal that the
    ledger kept bytes of. Turns stay the bytes that a worker wrote."""
    for payload in payloads:
        yield from _trained_lines(StoredGroup.of(payload), batch.step, result)
    for verdict, reason, payload in batch.untrained:
        yield from _untrained_lines(StoredGroup.of(payload), batch.step, verdict, reason)


def _trained_lines(group: StoredGroup, step: int, result: CreditedStep) -> Iterator[RecordLine]:
    parts = result.credit[group.id]
    shared = _verdict(result)
    shared["credit"] = {
        "scheme": parts.scheme,
        "weight": parts.weight,
        "totals": asdict(parts.totals),
        "scores": asdict(parts.scores),
        "by_action": {action: asdict(spread) for action, spread in parts.by_action.items()},
    }
    for index in range(len(group.lines)):
        more: StepFields = {
            **shared,
            "outcome": group.rewards[index].outcome,
            "advantages": _rounded(parts.advantages[index]),
            "outcome_parts": _rounded(parts.outcomes[index]),
            "process_parts": _rounded(parts.processes[index]),
            "step_rewards": _rounded(parts.step_rewards[index]),
            "same_steps": [_rounded(values) for values in parts.same_steps[index]],
        }
        line = _line(group, index, step, more)
        yield replace(line, learner_logprobs=result.turn_logprobs.get(line.head["id"]))


def _untrained_lines(group: StoredGroup, step: int, verdict: str, reason: str) -> Iterator[RecordLine]:
    for index, reward in enumerate(group.rewards):
        yield _line(group, index, step, {"verdict": verdict, "reason": reason, "outcome": reward.outcome})


def _line(group: StoredGroup, index: int, step: int, more: StepFields) -> RecordLine:
    """Of the trajectory at `index`, with the PRM's scores where it has some."""
    line, scores = RecordLine.of(group.lines[index]), group.step_scores
    head: StepHead = {**line.head, **more, "step": step}
    if scores is not None:
        head |= {"prm_scores": list(scores.raw[index]), "prm_digest": scores.prm_digest}
    return replace(line, head=head)


def _verdict(result: CreditedStep) -> StepFields:
    """What became of the batch: the version that it was trained into, or why the guard refused it."""
    if result.skipped is None:
        return {"verdict": "trained", "trained_as": result.policy_version}
    return {"verdict": "refused", "reason": result.skipped}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]
