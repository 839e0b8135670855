"""The folder of an evaluation: what it is of, a line for every attempt, and the rates they give."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple, NotRequired, TypedDict

from configs.errors import UserError, reason
from configs.run import RunConfig
from envs.datasets.benchmarks import stem_of
from envs.leakage import Retrieved, audit_retrieved
from envs.types import Task
from ray_jobs.evaluation_identity import Identity, Policy, differences, identity_of_phase, unproven
from ray_jobs.run.begun import begun_config, origin_of
from ray_jobs.run.folder import TRAJECTORIES, RunFolderError, write_json
from ray_jobs.run.provenance import provenance
from ray_jobs.statistics import wilson_interval
from rollout.codec import Record, flat_record, read_trajectories
from rollout.engines.engine import BASE_VERSION
from rollout.filters import SOLVED
from rollout.records import append_record, read_records
from rollout.types import is_answer

SCHEMA = 1
IDENTITY = "evaluation.json"
ITEMS = "items.jsonl"
SUMMARY = "summary.json"
NOT_RETRIEVED = ("think", "answer", "code", "base_generator")
"""Tools whose results were not written by anybody outside; what all others bring is audited for leaks."""


class EvaluationError(UserError):
    """An evaluation that cannot be run or read; the message says what is wrong and what to do."""


Place = tuple[str, str]
"""Of an item: its benchmark and its task id."""


class ItemKey(NamedTuple):
    benchmark: str
    task_id: str
    seed: int

    @property
    def place(self) -> Place:
        return self.benchmark, self.task_id

    def __str__(self) -> str:
        return "/".join(map(str, self))


ItemRecord = Record
"""The last attempt at an item, with the `seed`, `f1` (credit for a part of the answer), whether the judge was asked
(`judge_asked`) and its verdict (`judged`), the number of `attempts`, and their `seconds` together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The result of one item under one seed. `score` is the scorer's word alone, None for an item that is unscored.

    `f1` is None where there is no partial credit; `judged` is what the judge said, None where it was not asked or gave
    no verdict. `attempts` counts the tries that the infrastructure needed. `foreign_calls` are those of the verifier
    and the generator that other weights than the frozen base answered.
    """

    key: ItemKey
    question: str
    gold: str
    answer: str | None
    score: float | None
    f1: float | None
    judge_asked: bool
    judged: bool | None
    stop_reason: str
    attempts: int
    num_turns: int
    planner_versions: tuple[int, ...]
    frozen_calls: int
    foreign_calls: int
    retrieved: tuple[str, ...]

    @property
    def solved(self) -> bool:
        return self.score == SOLVED

    @property
    def broke_off(self) -> bool:
        """The engine or a tool broke, every time."""
        return self.stop_reason == "infrastructure"

    @property
    def undecided(self) -> bool:
        """A scorer of one's own cannot tell."""
        return self.score is None and not self.broke_off

    @property
    def failed(self) -> bool:
        """It broke off, or is undecided: nobody's answer was wrong, and the item is unscored."""
        return self.broke_off or self.undecided


class Judged(TypedDict):
    asked: int
    accepted: int
    silent: int
    solve_rate_with_judge: float


class Leaks(TypedDict):
    searched: int
    leaked: list[str]
    share: float


class BenchmarkRates(TypedDict):
    """`num_items` are different ones, `num_results` their tries under all seeds."""

    num_items: int
    num_scored: int
    num_results: int
    solve_rate: float | None
    solve_rate_ci95: tuple[float, float]
    by_seed: list[float]
    spread_over_seeds: float | None
    f1: float | None
    infrastructure_failures: int
    undecided: int
    retried: int
    endings: dict[str, int]
    no_answer: int
    turns: float
    judge: Judged | None
    leaks: Leaks


class EvaluationSummary(TypedDict):
    """Rates are means over scored items of their mean over scored seeds; results without a score are named in
    `unscored`, and counted by their reason: `infrastructure_failures`, and `undecided` by a scorer of one's own."""

    policy: Policy
    solve_rate: float | None
    solve_rate_ci95: tuple[float, float]
    mean_over_benchmarks: float
    num_items: int
    num_scored: int
    num_seeds: int
    infrastructure_failures: int
    undecided: int
    unscored: list[str]
    benchmarks: dict[str, BenchmarkRates]
    frozen_calls: int
    foreign_calls: int
    planner_versions: list[int]
    unproven: list[str]


class _Facts(TypedDict):
    """Evaluations of earlier releases do not say which of their items are those of `benchmarks`."""

    schema: int
    benchmarks: NotRequired[Sequence[str]]
    identity: Identity
    provenance: Mapping[str, object]


class EvaluationFolder:
    """Appends as it goes: an evaluation that was cut off goes on where it stopped."""

    def __init__(self, path: Path, identity: Identity, *, benchmarks: Sequence[str], seed: int) -> None:
        self.path = path
        check_no_run(path)
        path.mkdir(parents=True, exist_ok=True)
        if (path / IDENTITY).exists():
            _check_same(path, identity)
        else:
            origin = provenance(seed=seed)
            facts: _Facts = {"schema": SCHEMA, "identity": identity, "benchmarks": benchmarks, "provenance": origin}
            write_json(path / IDENTITY, facts)
        self.done = {item.key for item in items_of(path) if not item.broke_off}

    def add(self, record: ItemRecord) -> None:
        append_record(self.path / ITEMS, record)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvaluation:
    """An evaluation read back; of an item that was tried again, what came of it last. `benchmarks` are those that were
    asked for by name."""

    path: Path
    identity: Identity
    benchmarks: Sequence[str] = ()
    provenance: Mapping[str, object]
    items: Mapping[ItemKey, Item]

    @property
    def name(self) -> str:
        policy = self.identity["policy"]
        return str(policy["adapter"] or policy["model"])

    @property
    def scored(self) -> list[Item]:
        return [item for item in self.items.values() if not item.failed]

    @property
    def unscored(self) -> list[ItemKey]:
        return [key for key, item in self.items.items() if item.failed]


def read_evaluation(path: Path) -> StoredEvaluation:
    """Raises EvaluationError for a folder that holds no evaluation, or one of which items are missing."""
    facts = _facts(path)
    items = {item.key: item for item in items_of(path)}
    wanted = sum(row["count"] for row in facts["identity"]["items"].values()) * facts["identity"]["sampling"]["seeds"]
    if len(items) != wanted:
        raise EvaluationError(
            f"the evaluation in '{path}' has {len(items)} of {wanted} results; run the same command again to finish it"
        )
    return StoredEvaluation(
        path=path,
        identity=facts["identity"],
        benchmarks=facts.get("benchmarks", ()),
        provenance=facts["provenance"],
        items=items,
    )


def phases_of_run(path: Path) -> tuple[StoredEvaluation, StoredEvaluation]:
    """The evaluations before and after RL of a training run. Raises EvaluationError where one of them is missing."""
    try:
        config, origin = begun_config(path), origin_of(path)
    except RunFolderError as error:
        raise EvaluationError(f"{error}; or name two evaluations to compare") from error
    before, after = (_phase_of_run(path, config, origin, phase) for phase in ("eval_before", "eval_after"))
    return before, after


def _phase_of_run(path: Path, config: RunConfig, origin: Mapping[str, object], phase: str) -> StoredEvaluation:
    found = [item_of(flat_record(one)) for one in read_trajectories(path / TRAJECTORIES) if one.phase == phase]
    if not found:
        resume_it = f"`agentflow resume {shlex.quote(str(path))}`"
        raise EvaluationError(f"the run in '{path}' has no {phase}; {resume_it} goes on with it")
    tasks = [
        Task(id=item.key.task_id, dataset=item.key.benchmark, question=item.question, answer=item.gold)
        for item in found
    ]
    commit = f"{origin.get('git_commit')}{' with changes' if origin.get('git_dirty') else ''}"
    return StoredEvaluation(
        path=path,
        identity=identity_of_phase(config, phase, commit=commit, tasks=tasks),
        provenance=origin,
        items={item.key: item for item in found},
    )


def items_of(path: Path) -> Iterator[Item]:
    """In the order in which they were done; an item may stand there twice."""
    if (path / ITEMS).exists():
        yield from map(item_of, read_records(path / ITEMS))


def item_of(record: ItemRecord) -> Item:
    """From a line of `items.jsonl`, or from any trajectory record: that is one greedy try."""
    planned = [turn for turn in record["turns"] if turn["role"] == "planner"]
    # A tool's error may quote what it was asked; it brought in nothing.
    brought = [turn for turn in planned if turn["tool_error"] is None and turn["action"] not in NOT_RETRIEVED]
    versions = [turn["policy_version"] for turn in record["turns"] if turn["role"] != "planner"]
    return Item(
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
        frozen_calls=len(versions),
        foreign_calls=sum(version != BASE_VERSION for version in versions),
        retrieved=tuple(turn["result"] for turn in brought if turn["result"]),
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


def check_no_run(path: Path) -> None:
    """Whether results may be written there: a training run has files of the same names. Raises EvaluationError."""
    if (path / "config.json").exists():
        raise EvaluationError(
            f"'{path}' is the folder of a training run, whose summary and report would be written over; name another "
            "folder with --out"
        )


def _check_same(path: Path, identity: Identity) -> None:
    begun = _facts(path)["identity"]
    same_policy = begun["policy"].items() <= identity["policy"].items()
    changed = [*([] if same_policy else ["policy"]), *differences(begun, identity)]
    if changed:
        raise EvaluationError(
            f"'{path}' holds an evaluation with another {', '.join(changed)}; give the same settings to continue it, "
            "or another --out"
        )


def unscored_by_reason(items: Iterable[Item]) -> dict[str, list[ItemKey]]:
    """Of each reason for which some of the items are unscored, in words, those."""
    found = list(items)
    reasons = {
        "the engine or a tool failed at every attempt": [item.key for item in found if item.broke_off],
        "a scorer of one's own could not tell": [item.key for item in found if item.undecided],
    }
    return {reason: keys for reason, keys in reasons.items() if keys}


def why_unscored(items: Iterable[Item]) -> str:
    """Each reason in words, with its items; empty where all are scored."""
    return "; ".join(f"because {reason}: {_names(keys)}" for reason, keys in unscored_by_reason(items).items())


def _names(keys: Sequence[ItemKey], *, most: int = 5) -> str:
    """The items in words, the first ones by name."""
    names = list(map(str, keys[:most]))
    return ", ".join([*names, *([f"and {len(keys) - most} more"] if len(keys) > most else [])])


def summarize_evaluation(stored: StoredEvaluation) -> EvaluationSummary:
    """Needs a scored item."""
    items = list(stored.items.values())
    names = sorted({item.key.benchmark for item in items})
    benchmarks = {name: _results([item for item in items if item.key.benchmark == name]) for name in names}
    rates = [row["solve_rate"] for row in benchmarks.values() if row["solve_rate"] is not None]
    return {
        "policy": stored.identity["policy"],
        "solve_rate": _rate(items),
        "solve_rate_ci95": _interval(items),
        "mean_over_benchmarks": mean(rates),
        "num_items": sum(row["num_items"] for row in benchmarks.values()),
        "num_scored": sum(row["num_scored"] for row in benchmarks.values()),
        "num_seeds": stored.identity["sampling"]["seeds"],
        "infrastructure_failures": sum(item.broke_off for item in items),
        "undecided": sum(item.undecided for item in items),
        "unscored": list(map(str, stored.unscored)),
        "benchmarks": benchmarks,
        "frozen_calls": sum(item.frozen_calls for item in items),
        "foreign_calls": sum(item.foreign_calls for item in items),
        "planner_versions": sorted({version for item in items for version in item.planner_versions}),
        "unproven": unproven(stored.identity),
    }


def means_by_item(items: Iterable[Item], *, with_judge: bool = False) -> dict[Place, float]:
    """The mean of being solved over the seeds that were scored, `with_judge` also by its word; no entry where none
    was."""
    solved: dict[Place, list[bool]] = {}
    for item in items:
        if not item.failed:
            accepted = with_judge and item.judged is True
            solved.setdefault(item.key.place, []).append(item.solved or accepted)
    return {place: mean(results) for place, results in solved.items()}


def _results(items: Sequence[Item]) -> BenchmarkRates:
    scored = [item for item in items if not item.failed]
    by_seed = [
        [item.solved for item in scored if item.key.seed == seed] for seed in sorted({i.key.seed for i in scored})
    ]
    rates = [mean(solved) for solved in by_seed]
    partial = [item.f1 for item in scored if item.f1 is not None]
    return {
        "num_items": len({item.key.task_id for item in items}),
        "num_scored": len({item.key.task_id for item in scored}),
        "num_results": len(items),
        "solve_rate": _rate(items),
        "solve_rate_ci95": _interval(items),
        "by_seed": rates,
        "spread_over_seeds": stdev(rates) if len(rates) > 1 else None,
        "f1": mean(partial) if partial else None,
        "infrastructure_failures": sum(item.broke_off for item in items),
        "undecided": sum(item.undecided for item in items),
        "retried": sum(item.attempts > 1 for item in items),
        "endings": dict(Counter(item.stop_reason for item in items)),
        "no_answer": sum(not is_answer(item.answer) for item in scored),
        "turns": mean(item.num_turns for item in items),
        "judge": _judged(scored),
        "leaks": _leaks(items),
    }


def _rate(items: Sequence[Item]) -> float | None:
    """None where no item was scored."""
    means = means_by_item(items)
    return mean(means.values()) if means else None


def _interval(items: Sequence[Item]) -> tuple[float, float]:
    """Over items, not over tries: further seeds of an item say nothing of other items."""
    means = means_by_item(items)
    return wilson_interval(sum(means.values()), len(means))


def _judged(items: Sequence[Item]) -> Judged | None:
    """Apart from the exact score. None where nobody was asked."""
    asked = [item for item in items if item.judge_asked]
    if not asked:
        return None
    return {
        "asked": len(asked),
        "accepted": sum(item.judged is True for item in asked),
        "silent": sum(item.judged is None for item in asked),
        "solve_rate_with_judge": mean(means_by_item(items, with_judge=True).values()),
    }


def _leaks(items: Sequence[Item]) -> Leaks:
    """How many questions were found in what the tools brought in for them."""
    audit = audit_retrieved(
        Retrieved(id=str(item.key), question=stem_of(item.question), texts=item.retrieved) for item in items
    )
    return {
        "searched": audit.num_searched,
        "leaked": list(audit.leaked),
        "share": len(audit.leaked) / len(items),
    }
