"""Train a planner: evaluate, cold start, reinforce, evaluate again, report. The loop of the system."""

import time

import ray

from actors.cluster import start_ray, stop_ray
from configs.run import RunConfig
from ray_jobs.cast import Cast, get_or_fail, start_cast
from ray_jobs.console import Console, print_summary
from ray_jobs.phases import cold_start, evaluate, group_records
from ray_jobs.preflight import check_before_start
from ray_jobs.progress import TrainingTotals
from ray_jobs.report import write_report
from ray_jobs.run_folder import RunFolder
from ray_jobs.summary import summarize


def run_training(config: RunConfig) -> None:
    """The main job, from a checked configuration to a report in the run folder."""
    model_path = check_before_start(config)
    console = Console()
    with RunFolder.create(config) as folder:
        start_ray(config.cluster)
        try:
            with console.phase("start"):
                cast = start_cast(config, model_path)
            untouched = evaluate(cast, config, console, folder, "eval_untouched")
            demonstrations = cold_start(cast, config, console, folder)
            before = evaluate(cast, config, console, folder, "eval_before")
            totals = reinforce(cast, config, console, folder)
            after = evaluate(cast, config, console, folder, "eval_after")
            cast.close()
        finally:
            stop_ray()
        summary = summarize(
            config,
            untouched=untouched,
            before=before,
            after=after,
            cold_start=demonstrations,
            totals=totals,
            phases=console.phase_seconds,
        )
        folder.write_summary(summary)
    report = write_report(folder.path)
    print_summary(summary, report)


def reinforce(cast: Cast, config: RunConfig, console: Console, folder: RunFolder) -> TrainingTotals:
    """The RL loop: rollouts run `pipeline_depth` batches ahead of it, each step makes one policy version."""
    totals = TrainingTotals()
    rollouts = [worker.run.remote() for worker in cast.workers]
    with console.phase("reinforce", total=config.num_steps) as progress:
        for step in range(1, config.num_steps + 1):
            started = time.perf_counter()
            batch = get_or_fail(cast.buffer.next_batch.remote(), rollouts)
            waited = time.perf_counter() - started
            result = ray.get(cast.learner.train_step.remote(*batch.groups))
            ray.get(cast.learner.publish.remote(cast.weights))
            ray.get(cast.buffer.mark_trained.remote(result.policy_version))
            if step % config.learner.checkpoint_every == 0 or step == config.num_steps:
                ray.get(cast.learner.save_checkpoint.remote(folder.checkpoints))
            metrics = totals.add(batch, result, waited_s=waited, step_s=time.perf_counter() - started)
            folder.log_metrics(step, metrics)
            folder.log_trajectories(group_records(ray.get(batch.groups[0]), step))
            progress.advance(**totals.progress_fields)
    ray.get(cast.buffer.close.remote())
    ray.get(rollouts)
    cast.sync_weights(totals.policy_version)
    totals.finish(cast)
    return totals
