"""Evaluate one policy: benchmarks or held-out tasks, results as they come."""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from configs.envs import EnvsConfig
from configs.errors import visible
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.benchmarks import BENCHMARKS, load_benchmark
from envs.datasets.families import FAMILIES
from envs.datasets.sampler import evaluation_tasks, never_trained_on
from envs.types import Task
from ray_jobs.attempts import Attempts, Evaluator, Wanted
from ray_jobs.evaluation_folder import (
    SUMMARY,
    BenchmarkRates,
    EvaluationError,
    EvaluationFolder,
    EvaluationSummary,
    ItemKey,
    ItemRecord,
    read_evaluation,
    summarize_evaluation,
    why_unscored,
)
from ray_jobs.evaluation_identity import digest_of, identity_of
from ray_jobs.run.begun import begun_config, check_trained_alike, run_of, started_in
from ray_jobs.run.folder import write_json
from ray_jobs.run.local import open_worker
from ray_jobs.run.model_folder import resolve_model
from ray_jobs.run.preflight import check_key
from ray_jobs.viewer.evaluation import write_evaluation_page
from ray_jobs.viewer.render import percent, points
from reward.answer_judge import AnswerJudge


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What is asked for. Without `benchmarks` it is the recipe's held-out tasks; `whole` False takes files that hold a
    part of a benchmark; `limit` takes so many items of each, the same in every evaluation."""

    adapter: Path | None = None
    benchmarks: tuple[str, ...] = ()
    data: Path | None = None
    whole: bool = True
    num_seeds: int = 1
    limit: int | None = None
    out: Path | None = None


def run_evaluation(config: RunConfig, request: EvaluationRequest) -> Path:
    """Evaluate, or go on where an evaluation was cut off; returns the report. Raises EvaluationError and
    CheckpointError."""
    _check_settings(config, request)
    console = Console()
    tasks = evaluation_items(config, request)
    if beyond := beyond_search(config, request.benchmarks):
        console.print(
            f"{', '.join(beyond)}: no tool of this recipe finds facts of the world, and search=offline cannot answer "
            "this: it finds the catalogue of the generated tasks and nothing else. Put wikipedia_search into "
            "envs.actions, or set envs.search=tavily"
        )
    served = config.backend.type != "vllm"
    model_path = None if served else resolve_model(config.model.path)
    if request.adapter and model_path:
        check_trained_alike(request.adapter, config, model_path)
    identity = identity_of(
        config, adapter=request.adapter, model_path=model_path, tasks=tasks, num_seeds=request.num_seeds
    )
    out = request.out or Path(config.output_dir) / f"{config.name}-evaluation-{digest_of(identity)[:8]}"
    folder = EvaluationFolder(out, identity, benchmarks=request.benchmarks, seed=config.seed)
    wanted = [(task, seed) for seed in range(request.num_seeds) for task in tasks]
    missing = [one for one in wanted if _key(*one) not in folder.done]
    if len(missing) < len(wanted):
        console.print(f"{len(wanted) - len(missing)} of {len(wanted)} results are there already")
    if missing:
        with console.status("loading the engine"), open_worker(config, request.adapter) as solver:
            attempt_all(config, solver, missing, folder, console)
    return report_evaluation(out, console)


def evaluation_items(config: RunConfig, request: EvaluationRequest) -> list[Task]:
    """The items, benchmark by benchmark, without those that training meets. Raises EvaluationError where they cannot be
    had."""
    console = Console()
    try:
        if request.benchmarks:
            groups = {name: load_benchmark(name, request.data, whole=request.whole) for name in request.benchmarks}
            trained = _trained(config, request.adapter)
        else:
            groups = _by_dataset(evaluation_tasks(config))
            trained = _trained_besides(config, request.adapter, asked=groups)
        groups = {name: _never_trained_on(name, tasks, trained, console) for name, tasks in groups.items()}
    except (ValueError, OSError, KeyError) as error:
        raise EvaluationError(_said(error)) from error
    return [task for name, tasks in groups.items() for task in _some(name, tasks, request.limit)]


def beyond_search(config: RunConfig, benchmarks: Sequence[str]) -> list[str]:
    """The benchmarks that ask for facts of the world, where no tool of the recipe looks outside. A tool of one's own
    may, and so may an agent of one's own."""
    envs = config.envs
    outside = {"wikipedia_search", "web_search", "google_search", *envs.tools}
    if envs.search != "offline":
        outside.add("search")
    if not isinstance(config.agent, PlannerAgentConfig) or outside & {*envs.actions}:
        return []
    return [name for name in benchmarks if BENCHMARKS[name].asks_facts]


def attempt_all(
    config: RunConfig, policy: Attempts, wanted: Sequence[tuple[Task, int]], folder: EvaluationFolder, console: Console
) -> None:
    """Every item under its seed; each result is on disk as soon as it is there."""
    settings = config.evaluation
    judge = AnswerJudge(settings.judge) if settings.judge else None
    evaluator = Evaluator(
        policy=policy,
        phase="evaluate",
        temperature=settings.temperature,
        max_attempts=settings.max_attempts,
        judge=judge,
    )
    with Progress(console=console, transient=True) as progress:
        shown = progress.add_task("items", total=len(wanted))

        def keep(result: ItemRecord) -> None:
            folder.add(result)
            progress.advance(shown)

        asyncio.run(evaluator.evaluate([_wanted(*one) for one in wanted], keep))
    for why, count in judge.failures.most_common(3) if judge else ():
        console.print(f"{count} of the judge's votes are missing: {visible(why)}", markup=False, soft_wrap=True)


def report_evaluation(out: Path, console: Console) -> Path:
    """Summary, page and table of an evaluation that is complete. Raises EvaluationError where no item was scored."""
    stored = read_evaluation(out)
    why = why_unscored(stored.items.values())
    if not stored.scored:
        raise EvaluationError(
            f"none of the {len(stored.items)} items could be scored, {why}; mend that and run the same command again, "
            "with another --out where it is the scorer"
        )
    summary = summarize_evaluation(stored)
    write_json(out / SUMMARY, summary)
    page = write_evaluation_page(out, stored, summary)
    console.print(_table(stored.name, summary))
    if leaked := [name for row in summary["benchmarks"].values() for name in row["leaks"]["leaked"]]:
        console.print(
            f"[bold]leakage audit: {len(leaked)} of {len(stored.items)} results are leaked[/bold], most of the "
            f"question was found in what the tools brought in, first {escape(visible(leaked[0]))}"
        )
    if unscored := stored.unscored:
        again = "; the same command tries again what failed" if summary["infrastructure_failures"] else ""
        console.print(
            f"[bold]{len(unscored)} of {len(stored.items)} results are unscored and in no rate[/bold], "
            f"{escape(visible(why))}{again}"
        )
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    return page


def _check_settings(config: RunConfig, request: EvaluationRequest) -> None:
    if request.num_seeds > 1 and config.evaluation.temperature == 0:
        raise EvaluationError(
            f"--seeds {request.num_seeds} at evaluation.temperature = 0 are copies of one another; ask for one seed, "
            "or set evaluation.temperature=0.7"
        )
    if config.evaluation.judge:
        check_key("evaluation.judge.api_key_env", config.evaluation.judge.api_key_env)


def _key(task: Task, seed: int) -> ItemKey:
    return ItemKey(task.dataset, task.id, seed)


def _wanted(task: Task, seed: int) -> Wanted:
    return Wanted(task=task, seed=seed, trajectory_id=str(_key(task, seed)), group_id=f"seed {seed}")


def _never_trained_on(name: str, tasks: list[Task], trained: Sequence[EnvsConfig], console: Console) -> list[Task]:
    kept = tasks
    for envs in trained:
        kept = never_trained_on(kept, envs)
    if not kept:
        raise EvaluationError(f"training meets each of the {len(tasks)} items of '{name}': none is left to evaluate on")
    if len(kept) < len(tasks):
        left_out = len(tasks) - len(kept)
        console.print(
            f"{name}: {left_out} of {len(tasks)} items are left out, because training meets them", markup=False
        )
    return kept


def _trained(config: RunConfig, adapter: Path | None) -> list[EnvsConfig]:
    """What the recipe trains on, and what the run did that the adapter lies in."""
    run = run_of(adapter) if adapter else None
    if run is None:
        return [config.envs]
    envs = begun_config(run).envs
    if envs.data_path:
        data = started_in(run) / envs.data_path
        if not data.is_file():
            raise EvaluationError(
                f"the run in '{run}' was trained on '{data}', which is not there: which items it has met cannot be "
                "told; put the file back, or copy the checkpoint out of the run"
            )
        envs = envs.model_copy(update={"data_path": str(data)})
    return [config.envs, envs]


def _trained_besides(config: RunConfig, adapter: Path | None, *, asked: Iterable[str]) -> list[EnvsConfig]:
    """As `_trained`, for held-out tasks: a recipe that trains on its own is refused before. Nobody else asks what a
    generated family asks."""
    if not {*asked} - FAMILIES.keys():
        return []
    return [envs for envs in _trained(config, adapter) if envs != config.envs]


def _by_dataset(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        groups.setdefault(task.dataset, []).append(task)
    return groups


def _some(name: str, tasks: list[Task], limit: int | None) -> list[Task]:
    if limit is None or limit >= len(tasks):
        return tasks
    return random.Random(f"limit|{name}").sample(tasks, limit)


def _said(error: Exception) -> str:
    """A key by itself is no sentence."""
    if isinstance(error, KeyError):
        return f"a row of a benchmark lacks the column {error}; use the original file"
    return str(error)


def _table(name: str, summary: EvaluationSummary) -> Table:
    table = Table(title=f"Solved by {escape(visible(name))}", title_justify="left")
    for column in ("benchmark", "solved", "items", "95% interval"):
        table.add_column(column)
    rows: dict[str, BenchmarkRates | EvaluationSummary] = {**summary["benchmarks"]}
    if len(rows) > 1:
        rows["all"] = summary
    for label, row in rows.items():
        if row["solve_rate"] is None:
            table.add_row(Text(visible(label)), "unscored", "0", "")
            continue
        interval = f"{points(row['solve_rate_ci95'])}%"
        table.add_row(Text(visible(label)), percent(row["solve_rate"]), str(row["num_scored"]), interval)
    return table
