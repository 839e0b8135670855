"""Results of evaluations: the record of one item, the folder of an evaluation, and the phases of a training run."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple, TypedDict

from configs.errors import UserError, reason
from envs.types import Task
from ray_jobs.evaluation_identity import Identity, differences, identity_of_phase
from ray_jobs.run.folder import TRAJECTORIES, write_json
from ray_jobs.run.origin import origin_of, provenance, saved_config
from ray_jobs.statistics import PairedComparison, compare_paired
from rollout.codec import Record, flat_record, read_trajectories
from rollout.engines.engine import BASE_VERSION
from rollout.filters import SOLVED
from rollout.records import append_record, read_records

SCHEMA = 2
IDENTITY = "evaluation.json"
ITEMS = "items.jsonl"
SUMMARY = "summary.json"
NOT_RETRIEVED = ("think", "answer", "code", "base_generator")
"""Tools whose results do not come from outside. Those of all others are audited for leaks."""


class EvaluationError(UserError):
    """An evaluation that cannot be run, read or compared."""


Place = tuple[str, str]
"""The benchmark and the task id of an item."""


class ItemKey(NamedTuple):
    """An item under one seed."""

    benchmark: str
    task_id: str
    seed: int

    @property
    def place(self) -> Place:
        """The item itself."""
        return self.benchmark, self.task_id

    def __str__(self) -> str:
        return "/".join(map(str, self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The result of an item under one seed."""

    key: ItemKey
    question: str
    gold: str
    answer: str | None
    score: float | None
    """The scorer's result, without a judge. None if the item is unscored."""
    f1: float | None
    """Credit for a part of the answer. None if the benchmark has none."""
    judge_asked: bool
    judged: bool | None
    """The judge's verdict, None without one."""
    stop_reason: str
    attempts: int
    """Attempts that infrastructure failures made necessary."""
    num_turns: int
    planner_versions: tuple[int, ...]
    frozen_calls: int
    """Calls of verifier and generator."""
    foreign_calls: int
    """Those that other weights than the frozen base answered."""
    retrieved: tuple[str, ...]
    """Tool results from outside."""

    @classmethod
    def of(cls, record: Record) -> "Item":
        """Read a line of items.jsonl: a flat trajectory with `seed`, `f1`, `judge_asked`, `judged` and `attempts`. Any
        other trajectory is one greedy attempt."""
        planned = [turn for turn in record["turns"] if turn["role"] == "planner"]
        frozen = [turn["policy_version"] for turn in record["turns"] if turn["role"] != "planner"]
        # The error of a tool may quote the question, and retrieved nothing.
        retrieved = [turn for turn in planned if turn["tool_error"] is None and turn["action"] not in NOT_RETRIEVED]
        return cls(
            key=ItemKey(record["dataset"], record["task_id"], record.get("seed", 0)),
            question=record["question"],
            gold=record["gold"],
            answer=record["answer"],
            score=record["reward"],
            f1=record.get("f1"),
            judge_asked=record.get("judge_asked", False),
            judged=record.get("judged"),
            stop_reason=record["stop_reason"],
            attempts=record.get("attempts", 1),
            num_turns=len(planned),
            planner_versions=tuple(sorted({turn["policy_version"] for turn in planned})),
            frozen_calls=len(frozen),
            foreign_calls=sum(version != BASE_VERSION for version in frozen),
            retrieved=tuple(turn["result"] for turn in retrieved if turn["result"]),
        )

    @property
    def solved(self) -> bool:
        """True if the answer is right."""
        return self.score == SOLVED

    @property
    def broken(self) -> bool:
        """True if the engine or a tool failed at every attempt."""
        return self.stop_reason == "infrastructure"

    @property
    def undecided(self) -> bool:
        """True if a custom scorer could not score the answer."""
        return self.score is None and not self.broken

    @property
    def unscored(self) -> bool:
        """True if the item enters no rate."""
        return self.broken or self.undecided


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of one policy."""

    items: tuple[Item, ...]

    @property
    def solved(self) -> dict[ItemKey, bool]:
        """The scored items, and whether each was solved."""
        return {item.key: item.solved for item in self.items if not item.unscored}

    @property
    def unscored(self) -> list[ItemKey]:
        """The items without a score."""
        return [item.key for item in self.items if item.unscored]

    def paired_with(self, after: "Evaluation", *, dataset: str | None = None) -> list[tuple[bool, bool]]:
        """Return whether each policy solved each item that both have scored, of all data sets or of one."""
        before, solved = self.solved, after.solved
        return [
            (before[key], right) for key, right in solved.items() if key in before and dataset in (None, key.benchmark)
        ]

    def compared_with(self, after: "Evaluation", *, dataset: str | None = None) -> PairedComparison | None:
        """Compare both policies on the items that both have scored. None without any."""
        pairs = self.paired_with(after, dataset=dataset)
        return compare_paired([first for first, _ in pairs], [second for _, second in pairs]) if pairs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvaluation(Evaluation):
    """An evaluation read back from its folder."""

    path: Path
    identity: Identity
    benchmarks: Sequence[str] = ()
    """Benchmarks that were requested by name."""
    provenance: Mapping[str, object]

    @property
    def name(self) -> str:
        """The adapter, or the model if there is none."""
        policy = self.identity["policy"]
        return str(policy["adapter"] or policy["model"])


class _Facts(TypedDict):
    schema: int
    identity: Identity
    benchmarks: Sequence[str]
    provenance: Mapping[str, object]


class EvaluationFolder:
    """A folder to which an evaluation appends each result, so that it can be continued."""

    def __init__(self, path: Path, identity: Identity, *, benchmarks: Sequence[str], seed: int) -> None:
        """Create the folder, or open that of an unfinished evaluation. Raises EvaluationError if it is another one."""
        self.path = path
        check_no_run(path)
        path.mkdir(parents=True, exist_ok=True)
        if (path / IDENTITY).exists():
            known = _facts(path)["identity"]
            changed = [*(["policy"] if known["policy"] != identity["policy"] else []), *differences(known, identity)]
            if changed:
                raise EvaluationError(
                    f"'{path}' holds an evaluation with another {', '.join(changed)}; use its settings to continue it, "
                    "or another --out"
                )
        else:
            origin = provenance(seed=seed)
            facts: _Facts = {"schema": SCHEMA, "identity": identity, "benchmarks": benchmarks, "provenance": origin}
            write_json(path / IDENTITY, facts)
        self.done = {item.key for item in read_items(path) if not item.broken}
        """Items that need no further attempt."""

    def add(self, record: Record) -> None:
        """Write the result of an item to disk."""
        append_record(self.path / ITEMS, record)


def read_items(path: Path) -> tuple[Item, ...]:
    """Read the newest result of each item in a folder."""
    records = read_records(path / ITEMS) if (path / ITEMS).exists() else ()
    return tuple({item.key: item for item in map(Item.of, records)}.values())


def read_evaluation(path: Path) -> StoredEvaluation:
    """Read a finished evaluation. Raises EvaluationError if there is none, or if results are missing."""
    facts, items = _facts(path), read_items(path)
    total = sum(row["count"] for row in facts["identity"]["items"].values()) * facts["identity"]["seeds"]
    if len(items) != total:
        raise EvaluationError(
            f"the evaluation in '{path}' has {len(items)} of {total} results; run the same command again to finish it"
        )
    return StoredEvaluation(
        path=path,
        items=items,
        identity=facts["identity"],
        benchmarks=facts["benchmarks"],
        provenance=facts["provenance"],
    )


def _facts(path: Path) -> _Facts:
    try:
        facts: _Facts = json.loads((path / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvaluationError(
            f"'{path}' holds no evaluation ({reason(error)}); name a folder that `agentflow evaluate` wrote"
        ) from error
    if facts.get("schema") != SCHEMA:
        raise EvaluationError(f"'{path}' has schema {facts.get('schema')}, this version reads {SCHEMA}; evaluate again")
    return facts


def phases_of_run(path: Path) -> tuple[StoredEvaluation, StoredEvaluation]:
    """Read the evaluations before and after RL of a training run. Raises EvaluationError if one is missing."""
    try:
        config, origin = saved_config(path), origin_of(path)
    except UserError as error:
        raise EvaluationError(f"{error}; or name two evaluations to compare") from error
    sides = []
    for phase in ("eval_before", "eval_after"):
        items = evaluation_in(path, phase).items
        if not items:
            raise EvaluationError(
                f"the run in '{path}' has no {phase}; `agentflow resume {shlex.quote(str(path))}` continues it"
            )
        rows = [(item.key, item.question, item.gold) for item in items]
        tasks = [Task(id=key.task_id, dataset=key.benchmark, question=q, answer=gold) for key, q, gold in rows]
        identity = identity_of_phase(config, phase, tasks)
        sides.append(StoredEvaluation(path=path, identity=identity, provenance=origin, items=items))
    return sides[0], sides[1]


def evaluation_in(folder: Path, phase: str) -> Evaluation:
    """Read a phase of a training run."""
    logged = (trajectory for trajectory in read_trajectories(folder / TRAJECTORIES) if trajectory.phase == phase)
    return Evaluation(items=tuple(Item.of(flat_record(trajectory)) for trajectory in logged))


def check_no_run(path: Path) -> None:
    """Raise EvaluationError for the folder of a training run, whose summary and report would be overwritten."""
    if (path / "config.json").exists():
        raise EvaluationError(f"'{path}' is the folder of a training run; name another folder with --out")


def why_unscored(items: Iterable[Item]) -> str:
    """Describe why items are unscored, with the first ones of each reason. Empty if all are scored."""
    items = list(items)
    reasons = {
        "the engine or a tool failed at every attempt": [item.key for item in items if item.broken],
        "a custom scorer could not score the answer": [item.key for item in items if item.undecided],
    }
    parts = []
    for text, keys in reasons.items():
        if keys:
            names = ", ".join(map(str, keys[:5])) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            parts.append(f"{text}: {names}")
    return "; ".join(parts)


def means_by_item(items: Iterable[Item], *, with_judge: bool = False) -> dict[Place, float]:
    """Return for each item the share of its scored seeds that solved it, `with_judge` also by the judge's verdict."""
    solved: dict[Place, list[bool]] = {}
    for item in items:
        if not item.unscored:
            accepted = with_judge and item.judged is True
            solved.setdefault(item.key.place, []).append(item.solved or accepted)
    return {place: mean(results) for place, results in solved.items()}
