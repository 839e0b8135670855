"""What an evaluation found: rates with intervals per benchmark, all items in the denominator."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from envs.benchmarks.readers import stem_of
from envs.leakage import Retrieved, audit_retrieved
from ray_jobs.evaluation_folder import Item, StoredEvaluation
from ray_jobs.evaluation_identity import unproven
from reward.paired import wilson_interval


def summarize_evaluation(stored: StoredEvaluation) -> dict[str, Any]:
    """JSON values only. Rates are means over items of their mean over seeds; an item whose infrastructure failed at
    every try counts as not solved."""
    items = list(stored.items.values())
    names = sorted({item.key.benchmark for item in items})
    benchmarks = {name: _results([item for item in items if item.key.benchmark == name]) for name in names}
    return {
        "policy": stored.identity["policy"],
        "solve_rate": _rate(items),
        "solve_rate_ci95": list(_interval(items)),
        "mean_over_benchmarks": mean(row["solve_rate"] for row in benchmarks.values()),
        "num_items": sum(row["num_items"] for row in benchmarks.values()),
        "num_seeds": stored.identity["sampling"]["seeds"],
        "infrastructure_failures": sum(item.failed for item in items),
        "benchmarks": benchmarks,
        "frozen_calls": sum(item.frozen_calls for item in items),
        "foreign_calls": sum(item.foreign_calls for item in items),
        "planner_versions": sorted({version for item in items for version in item.planner_versions}),
        "unproven": unproven(stored.identity),
    }


def means_by_item(items: Iterable[Item]) -> dict[tuple[str, str], float]:
    """(Benchmark, task id) -> mean over seeds of being solved."""
    solved: dict[tuple[str, str], list[bool]] = {}
    for item in items:
        solved.setdefault((item.key.benchmark, item.key.task_id), []).append(item.solved)
    return {place: mean(results) for place, results in solved.items()}


def _results(items: Sequence[Item]) -> dict[str, Any]:
    by_seed = [[item for item in items if item.key.seed == seed] for seed in sorted({item.key.seed for item in items})]
    rates = [mean(item.solved for item in one) for one in by_seed]
    partial = [item.f1 for item in items if item.f1 is not None]
    return {
        "num_items": len({item.key.task_id for item in items}),
        "num_results": len(items),
        "solve_rate": _rate(items),
        "solve_rate_ci95": list(_interval(items)),
        "by_seed": rates,
        "spread_over_seeds": stdev(rates) if len(rates) > 1 else None,
        "f1": mean(partial) if partial else None,
        "infrastructure_failures": sum(item.failed for item in items),
        "retried": sum(item.attempts > 1 for item in items),
        "endings": dict(Counter(item.stop_reason for item in items)),
        "no_answer": sum(item.answer is None and not item.failed for item in items),
        "turns": mean(item.num_turns for item in items),
        "judge": _judged(items),
        "leaks": _leaks(items),
    }


def _rate(items: Sequence[Item]) -> float:
    return mean(means_by_item(items).values())


def _interval(items: Sequence[Item]) -> tuple[float, float]:
    """Over items, not over tries: further seeds of an item say nothing of other items."""
    means = means_by_item(items)
    return wilson_interval(sum(means.values()), len(means))


def _judged(items: Sequence[Item]) -> Mapping[str, Any] | None:
    """Apart from the exact score. None where nobody was asked."""
    asked = [item for item in items if item.judge_asked]
    if not asked:
        return None
    accepted = sum(item.judged is True for item in asked)
    return {
        "asked": len(asked),
        "accepted": accepted,
        "silent": sum(item.judged is None for item in asked),
        "solve_rate_with_judge": (sum(item.solved for item in items) + accepted) / len(items),
    }


def _leaks(items: Sequence[Item]) -> Mapping[str, Any]:
    """How many questions were found in what the tools brought in for them."""
    audit = audit_retrieved(
        Retrieved(id="/".join(map(str, item.key)), question=stem_of(item.question), texts=item.retrieved)
        for item in items
    )
    return {
        "searched": audit.num_searched,
        "leaked": list(audit.leaked),
        "share": len(audit.leaked) / len(items),
    }
