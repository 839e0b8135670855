"""Train a planner: evaluate, cold start, reinforce, evaluate again, report. The loop of the system."""

import time
from collections.abc import Mapping
from typing import Any

import ray

from configs.run import RunConfig
from ray_jobs.console import print_summary
from ray_jobs.phases import cold_start, evaluate, group_records
from ray_jobs.prm_phases import collect, label, learn_prm, watch_prm
from ray_jobs.progress import TrainingTotals
from ray_jobs.report import write_report
from ray_jobs.run import Run, finished_summary, open_run
from ray_jobs.run_folder import run_path
from ray_jobs.summary import summarize
from reward.alarms import HackingMonitor


def run_training(config: RunConfig, *, with_prm: bool = False, resume: bool = False) -> None:
    """The main job, from a checked configuration to a report in the run folder. `with_prm` is the pipeline: it
    collects, labels and trains a process reward model of its own first. `resume` skips the phases that are done."""
    if resume and (summary := finished_summary(config)):
        print_summary(summary, write_report(run_path(config)))
        return
    with open_run(config, with_prm=with_prm, resume=resume) as run:
        untouched = evaluate(run, "eval_untouched")
        demonstrations = cold_start(run)
        before = evaluate(run, "eval_before")
        if with_prm:
            collected = collect(run)
            labels = label(run, collected)
            learn_prm(run, collected, labels)
        training = reinforce(run)
        after = evaluate(run, "eval_after")
    summary = summarize(
        run, untouched=untouched, before=before, after=after, cold_start=demonstrations, training=training
    )
    run.folder.write_summary(summary)
    print_summary(summary, write_report(run.folder.path))


def reinforce(run: Run) -> Mapping[str, Any]:
    """The RL loop: rollouts run `pipeline_depth` batches ahead of it, each step makes one policy version."""
    config, cast, totals = run.config, run.cast, TrainingTotals()
    if (facts := run.finished("reinforce")) is not None:
        cast.load_policy(run.folder.checkpoints)
        return facts
    monitor = HackingMonitor(config.reward.alarms, config.reward.prm_weight)
    rollouts = [worker.run.remote() for worker in cast.workers]
    with run.phase("reinforce", total=config.num_steps) as phase:
        for step in range(1, config.num_steps + 1):
            started = time.perf_counter()
            batch = cast.next_batch(rollouts)
            waited = time.perf_counter() - started
            prm_weight = monitor.prm_weight
            result = ray.get(cast.learner.train_step.remote(*batch.groups, prm_weight=prm_weight))
            ray.get(cast.learner.publish.remote(cast.weights))
            ray.get(cast.buffer.mark_trained.remote(result.policy_version))
            if step % config.learner.checkpoint_every == 0 or step == config.num_steps:
                ray.get(cast.learner.save_checkpoint.remote(run.folder.checkpoints))
            shown = ray.get(batch.groups[0])
            metrics = totals.add(batch, result, waited_s=waited, step_s=time.perf_counter() - started)
            metrics |= watch_prm(run, shown, step, prm_weight)
            for alarm in monitor.observe(step, metrics) if cast.prm_judges else ():
                run.console.note(f"alarm: {alarm.message}; the PRM's weight is now {alarm.prm_weight:.3g}")
            run.folder.log_metrics(step, metrics)
            records = group_records(shown, step, credit=config.reward.credit, prm_weight=prm_weight)
            run.folder.log_trajectories(records)
            phase.progress.advance(**totals.progress_fields)
        ray.get(cast.buffer.close.remote())
        ray.get(rollouts)
        cast.sync_weights(totals.policy_version)
        phase.facts.update(totals.facts(cast, monitor))
    return phase.facts
