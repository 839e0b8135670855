"""Train a planner: evaluate, cold start, reinforce, evaluate again, report. The loop of the system.

    rollout workers ── judged groups ──> store ── batch, by reference ──> learner
         ^    |                          |   ^                               |
         |    └─ steps to score ─> PRM   |   └──────── new adapter ──────────┘
         └──── permits, new adapter ─────┘

Who makes what, what each waits for, and what wakes it:

    who      makes                        waits for                            is woken by
    worker   groups of attempts           a permit, or weights new enough      a batch that is cut, an adapter published
    PRM      a score for each step        a worker that asks                   the call
    store    permits, batches, the order  results, adapters                    each of them; it never computes
    learner  an optimizer step            the driver                           the call `train_step`
    driver   nothing: it moves the loop   a batch, then the step, then the     the answer; the watch kills what does not
                                          adapter in the store                 answer, the supervisor replaces it

Outside of the RL loop `ray_jobs/run/rollouts.py` replaces workers.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import ray

from actors.cluster import PART_LOST
from actors.learner import LearnerCalls
from configs.run import RunConfig
from learner.checkpoint import continue_from_newest, oldest_kept_step
from ray_jobs.held_out import evaluate, evaluate_step
from ray_jobs.phases.cold_start import cold_start, load_cold_start
from ray_jobs.phases.collect import collect
from ray_jobs.phases.label import label
from ray_jobs.phases.prm import learn_prm, watch_prm
from ray_jobs.run.bottleneck import StepTimes
from ray_jobs.run.console import print_summary
from ray_jobs.run.preflight import Ready
from ray_jobs.run.progress import Training, lost_rows, step_metrics
from ray_jobs.run.provenance import shown
from ray_jobs.run.run import Run, open_run
from ray_jobs.run.step_records import StepGroups, step_records
from ray_jobs.run.summary import summarize
from ray_jobs.run.supervisor import LearnerLostError, Supervisor
from ray_jobs.viewer.report import write_report
from rollout.store.lifecycle import NOTHING_TRAINED


def run_training(config: RunConfig, ready: Ready, *, with_prm: bool) -> None:
    """The main job, from what preflight found `ready` to a report in the run folder. With `with_prm`
    it collects, labels and trains a process reward model of its own first. A run that was cut off is continued."""
    with open_run(config, ready, with_prm=with_prm) as run:
        untouched = evaluate(run, "eval_untouched")
        demonstrations = cold_start(run)
        before = evaluate(run, "eval_before")
        if with_prm:
            collected = collect(run)
            labels = label(run, collected)
            learn_prm(run, collected, labels)
        training = reinforce(run)
        after = evaluate(run, "eval_after")
    start_s, evaluations = (
        run.console.phase_seconds["start"],
        {"untouched": untouched, "before": before, "after": after},
    )
    summary = summarize(
        run.config, run.folder, start_s=start_s, **evaluations, cold_start=demonstrations, training=training
    )
    run.folder.write_summary(summary)
    print_summary(summary, Path(shown(write_report(run.folder.path))))


def reinforce(run: Run) -> Mapping[str, object]:
    """The RL loop: rollouts run `pipeline_depth` batches ahead of it, each step makes one policy version."""
    config, actors = run.config, run.actors
    training = continue_training(run)
    # Of a run that goes on, workers sample with the cold-started policy up to here.
    actors.sync_weights()
    if (facts := run.finished("reinforce")) is not None:
        return facts
    ray.get(actors.store.begin_again.remote())
    with run.phase("reinforce", total=config.num_steps) as phase:
        phase.seconds_before = run.folder.begin_phase("reinforce")
        phase.skip(training.num_steps)
        with Supervisor(run) as rollouts:
            while training.num_steps < config.num_steps:
                try:
                    if not train_step(run, training, rollouts):
                        break
                    phase.advance(**training.progress_fields)
                except LearnerLostError as error:
                    training = continue_with_new_learner(run, rollouts, error)
        actors.sync_weights()
        phase.facts.update(training.facts(actors, actors.watch.num_deaths()))
    return phase.facts


def train_step(run: Run, training: Training, rollouts: Supervisor) -> bool:
    """One turn of the loop; False when no tasks are left, and then a checkpoint knows all steps. The batch is trained,
    or refused by the learner's guard, for good once a checkpoint knows it; until then the store keeps its bytes, and a
    crash takes the loop back to the checkpoint before."""
    config, actors, step = run.config, run.actors, training.num_steps + 1
    started = time.perf_counter()
    cut, payloads = actors.store.next_batch.remote(step)
    if (batch := rollouts.get(cut, f"the groups of step {step}")) is None:
        if training.num_steps % config.learner.checkpoint_every:
            keep(run, rollouts)
        return False
    batched = time.perf_counter()
    groups = StepGroups(payloads)
    prm_weight = training.monitor.prm_weight
    result = rollouts.learn(LearnerCalls.train_step, batch, (payloads,), prm_weight=prm_weight)
    trained = time.perf_counter()
    rollouts.learn(LearnerCalls.publish, actors.store)
    published = time.perf_counter()
    times = StepTimes(
        wait_s=batched - started, train_s=trained - batched, publish_s=published - trained, step_s=published - started
    )
    metrics = step_metrics(batch, result, times, rollouts.readings())
    metrics |= watch_prm(run, groups, step, prm_weight)
    run.log_metrics(step, metrics)
    lines = step_records(batch, groups, result)
    run.folder.log_step(step, lines, version_ages=batch.version_ages, num_trained=result.num_trajectories)
    alarms = training.add(metrics)
    run.tell(batch.warning, result.skipped, training.news(), *alarms)
    if config.evaluates_after(step):
        evaluate_step(run, rollouts, step)
    ray.get(actors.store.mark_trained.remote(step, result.policy_version, refused=result.skipped))
    if step % config.learner.checkpoint_every == 0 or step == config.num_steps:
        keep(run, rollouts)
    rollouts.progressed()
    return True


def keep(run: Run, rollouts: Supervisor) -> None:
    """A checkpoint, in an order in which a power cut at any point leaves no checkpoint that knows of more than logs and
    ledger do, and no byte forgotten that a checkpoint which is left may ask for."""
    store, checkpoints = run.actors.store, run.folder.checkpoints
    run.folder.sync()
    trained = ray.get(store.sync.remote())
    rollouts.learn(LearnerCalls.save_checkpoint, checkpoints, trained)
    run.folder.settle()
    ray.get(store.forget.remote(oldest_kept_step(checkpoints)))


def continue_with_new_learner(run: Run, rollouts: Supervisor, error: Exception) -> Training:
    """As `continue_training`, with another learner in the place of the one that died, and of those that die over it."""
    while True:
        try:
            rollouts.replace_learner(error)
            return continue_training(run, new_learner=True)
        except PART_LOST as again:
            error = again


def continue_training(run: Run, *, new_learner: bool = False) -> Training:
    """Learner, ledger and logs brought to the newest checkpoint that can be trusted, or to the cold-started policy; and
    the training up to there. A run that begins is at step 0, with the cold-started policy in place already."""
    checkpoint, faults = continue_from_newest(run.folder.checkpoints)
    run.tell(*(f"passed over a checkpoint: {fault}" for fault in faults))
    if new_learner:
        load_cold_start(run)
    if checkpoint:
        run.actors.ask_learner(LearnerCalls.load_checkpoint, checkpoint.folder)
    version = run.actors.publish_anew() if checkpoint or new_learner else run.actors.newest_version()
    step, trained = (checkpoint.step, checkpoint.trained()) if checkpoint else (0, NOTHING_TRAINED)
    run.tell(*ray.get(run.actors.store.rewind.remote(step, version, trained)))
    if (facts := run.finished("reinforce")) is not None and step < facts["num_steps"]:
        run.folder.reopen_phase("reinforce")
        run.tell(f"no checkpoint is left that knows the train steps after {step}: they are made again")
    rows = run.folder.rewind(step)
    run.tell(lost_rows(rows, step))
    scored = run.actors.uses_prm or run.config.reward.turn_scorer is not None
    return Training.of(run.config, rows, num_steps=step, scored=scored)
