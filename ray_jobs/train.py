"""Train a policy: evaluate, cold start, reinforce, evaluate again, report. The training loop of the system.

    rollout workers ── judged groups ──> dynamic sampling ── batch, by reference ──> LoRA learner
         ^    |                                |    ^                                     |
         |    └─ steps to score ─> PRM         |    └──────────── new adapter ────────────┘
         └────── permits, new adapter ─────────┘

The driver here calls the others in turn; `actors/supervisor.py` replaces workers, PRM and learner that are lost
meanwhile. An interrupted run loses only the train steps since its newest checkpoint and the groups in flight.
"""

import time
from collections.abc import Mapping
from pathlib import Path

import ray

from actors.cluster import LearnerLostError
from configs.errors import user_error
from configs.run import RunConfig
from learner.checkpoint import NO_GROUPS, newest_checkpoint
from learner.types import StepResult
from ray_jobs.cold_start import cold_start, load_cold_start
from ray_jobs.held_out import evaluate, evaluate_step
from ray_jobs.prm import prepare_prm
from ray_jobs.run.origin import shown
from ray_jobs.run.preflight import Ready
from ray_jobs.run.progress import Training, batch_groups, group_rows, step_metrics, step_trajectories
from ray_jobs.run.run import Run, open_run
from ray_jobs.run.summary import print_summary, summarize
from ray_jobs.viewer.report import write_report
from rollout.filters import NoSignalError
from rollout.lifecycle import Batch


def run_training(config: RunConfig, ready: Ready, *, with_prm: bool) -> None:
    """Train a policy, `with_prm` after a process reward model, and write the report. Continue an interrupted run."""
    with open_run(config, ready, with_prm=with_prm) as run:
        untouched = evaluate(run, "eval_untouched")
        imitated = cold_start(run)
        before = evaluate(run, "eval_before")
        if with_prm:
            prepare_prm(run)
        training = reinforce(run)
        after = evaluate(run, "eval_after")
    summary = summarize(run, untouched=untouched, before=before, after=after, cold_start=imitated, training=training)
    run.folder.write_summary(summary)
    print_summary(summary, Path(shown(write_report(run.folder.path))))


def reinforce(run: Run) -> Mapping[str, object]:
    """Run the RL loop: each step makes one policy version, and rollouts run `pipeline_depth` batches ahead."""
    config = run.config
    training = continue_training(run)
    # The workers of a resumed run use the cold-started policy up to here.
    run.supervisor.sync(run.rollouts.policy_version)
    if (facts := run.finished("reinforce")) is not None:
        return facts
    with run.phase("reinforce", total=config.num_steps) as phase:
        phase.seconds_before = run.folder.begin_phase("reinforce")
        phase.continue_after(training.num_steps)
        lost: LearnerLostError | None = None
        with run.supervisor.rolling_out(run.prm_digest):
            run.supervisor.readings()  # discard those of earlier phases
            while lost or training.num_steps < config.num_steps:
                try:
                    if lost:
                        run.supervisor.restart_learner(lost)
                        training, lost = continue_training(run, new_learner=True), None
                        phase.continue_after(training.num_steps)
                    elif not train_step(run, training):
                        break
                    else:
                        phase.advance(**training.progress_fields)
                except LearnerLostError as error:
                    lost = error
        phase.facts.update(training.facts(run.sampling, run.supervisor.num_restarts))
    return phase.facts


def train_step(run: Run, training: Training) -> bool:
    """Make one train step. Return False when no tasks or no signal is left, after a checkpoint of all steps.

    Raises NoSignalError before the first step.
    """
    config, supervisor, step = run.config, run.supervisor, training.num_steps + 1
    started = time.perf_counter()
    batch: Batch | None = None
    try:
        batch = supervisor.wait(run.sampling.next_batch.remote(step), f"the groups of step {step}")
    except NoSignalError as error:
        if not training.num_steps:
            raise
        training.ended_early = user_error(error)
        run.tell(f"training ends after step {training.num_steps}: {training.ended_early}")
    if batch is None:
        if training.num_steps % config.learner.checkpoint_every:
            save_checkpoint(run)
        return False
    batched = time.perf_counter()
    result: StepResult = supervisor.learn("train_step", batch)
    trained = time.perf_counter()
    run.publish()
    metrics = step_metrics(
        batch,
        result,
        supervisor.readings(),
        wait_s=batched - started,
        train_s=trained - batched,
        publish_s=time.perf_counter() - trained,
    )
    run.log_metrics(step, metrics)
    run.folder.log_step(
        step_trajectories(batch, batch_groups(batch), result, scheme=config.reward.credit.type),
        group_rows(batch, result),
    )
    run.tell(batch.warning, result.skipped, *training.add(step, metrics))
    if config.evaluates_after(step):
        evaluate_step(run, step)
    ray.get(run.sampling.mark_trained.remote(step, result.policy_version, refused=result.skipped))
    if step % config.learner.checkpoint_every == 0 or step == config.num_steps:
        save_checkpoint(run)
    supervisor.progressed()
    return True


def save_checkpoint(run: Run) -> None:
    """Save the weights and the state of the buffer after the newest train step.

    The logs are synced first, so that they hold all steps of any checkpoint that survives a power cut.
    """
    run.folder.sync()
    snapshot = ray.get(run.sampling.snapshot.remote())
    run.supervisor.learn("save_checkpoint", run.folder.checkpoints, snapshot)
    run.folder.settle()


def continue_training(run: Run, *, new_learner: bool = False) -> Training:
    """Load the newest valid checkpoint, or the cold-started policy, into learner, buffer and logs.

    Return the training up to there. The learner of a new run already has the cold-started policy.
    """
    checkpoint, faults = newest_checkpoint(run.folder.checkpoints, set_aside=True)
    run.tell(*(f"skipped a checkpoint: {fault}" for fault in faults))
    if new_learner:
        load_cold_start(run)
    if checkpoint:
        run.supervisor.learn("load_checkpoint", checkpoint.folder)
    version = run.publish(renumber=True) if checkpoint or new_learner else run.rollouts.policy_version
    step, snapshot = (checkpoint.step, checkpoint.snapshot()) if checkpoint else (0, NO_GROUPS)
    ray.get(run.sampling.restore.remote(snapshot, step, version))
    if (facts := run.finished("reinforce")) is not None and step < facts["num_steps"]:
        run.folder.reopen_phase("reinforce")
        run.tell(f"no checkpoint of the train steps after {step} is left: they are repeated")
    rows = run.folder.rewind(step)
    return Training(rows, num_steps=step)
