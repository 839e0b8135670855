"""The cold start: the policy imitates demonstrations before RL."""

import asyncio
import random
from collections.abc import Mapping, Sequence

from configs.errors import UserError
from configs.learner import FileConfig, PlansConfig, TeacherConfig
from envs.datasets.sampler import cold_start_tasks, num_plans
from learner.checkpoint import newest_checkpoint
from ray_jobs.run.run import Run
from reward.scorers import outcome_of
from rollout.filters import SOLVED
from rollout.types import Trajectory

PLANS_PER_STEP = 4
"""Plans per optimizer step."""
DEMONSTRATIONS_PER_STEP = 8
"""Demonstrations of a custom agent per optimizer step."""


def cold_start(run: Run) -> Mapping[str, object]:
    """Imitate demonstrations in supervised steps, then publish version 0."""
    facts = run.finished("cold_start")
    if facts is None:
        facts = _imitate(run)
    with run.console.waiting("every rollout worker to take up the policy that RL begins with"):
        load_cold_start(run)
        run.supervisor.sync(run.publish(renumber=True))
    return facts


def load_cold_start(run: Run) -> None:
    """Load the cold-started policy into the learner, ready for RL. Raises UserError if it is missing."""
    checkpoint, faults = newest_checkpoint(run.folder.cold_start)
    if checkpoint is None:
        raise UserError(
            f"'{run.folder.cold_start}' holds no usable checkpoint of the policy that RL begins with {faults[:1]}; "
            "restore the folder, or start a new run with another name=..."
        )
    run.supervisor.learn("load_checkpoint", checkpoint.folder)
    run.supervisor.learn("begin_reinforcement")


def _imitate(run: Run) -> Mapping[str, object]:
    settings = run.config.cold_start
    nothing = isinstance(settings, PlansConfig) and not num_plans(run.config)
    with run.phase("cold_start", total=0 if nothing else None) as phase:
        played = [] if nothing else asyncio.run(run.rollouts.demonstrate(cold_start_tasks(run.config)))
        # Each score is computed once, since a custom scorer may be slow or random. A file's answers have no reference.
        scores = {} if isinstance(settings, FileConfig) else {one.id: outcome_of(one) for one in played}
        demonstrations = played
        if isinstance(settings, TeacherConfig):
            demonstrations = _well_answered(run, played, scores, settings.min_score)
        else:
            _check_played(played, run.config.rollout.max_turn_tokens)
        phase.facts["num_demonstrations"] = len(demonstrations)
        if not isinstance(settings, FileConfig):
            phase.facts["num_right"] = sum(scores[one.id] == SOLVED for one in demonstrations)
        run.supervisor.learn("begin_imitation")
        if isinstance(settings, PlansConfig):
            # They are drawn at random, and the lazy ones are spread evenly.
            size, order = PLANS_PER_STEP, demonstrations * settings.num_passes
        else:
            size = DEMONSTRATIONS_PER_STEP
            rngs = (random.Random(f"imitation|{run.config.seed}|{number}") for number in range(settings.num_passes))
            order = [one for rng in rngs for one in rng.sample(demonstrations, len(demonstrations))]
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        phase.expect(len(batches))
        for step, batch in enumerate(batches):
            # The rate falls to zero, since with a constant one the policy would overfit the last batches.
            rate = settings.learning_rate * (1 - step / len(batches))
            result = run.supervisor.learn("imitate_step", batch, rate)
            run.log_metrics(step, result.metrics)
            phase.advance(loss=result.metrics["cold_start/loss"])
        run.supervisor.learn("save_checkpoint", run.folder.cold_start)
    return phase.facts


def _check_played(played: Sequence[Trajectory], max_turn_tokens: int) -> None:
    """Raise UserError unless every plan reached its answer in well-formed steps of at most `max_turn_tokens`."""
    if broken := [attempt for attempt in played if attempt.stop_reason != "answered" or attempt.num_format_errors]:
        first = broken[0]
        malformed = next((turn.format_error for turn in first.turns if turn.format_error), None)
        raise UserError(
            f"{len(broken)} of {len(played)} plans of the cold start did not reach their answer, first "
            f"{first.task.id}: {first.failure or malformed or first.stop_reason}; check the tools of envs.actions, "
            "raise rollout.engine.max_model_len if it ended as 'context', or set cold_start.num_demonstrations=0"
        )
    longest = max((turn.num_tokens for attempt in played for turn in attempt.planner_turns), default=0)
    if longest > max_turn_tokens:
        raise UserError(
            f"plans of the cold start have steps of up to {longest} tokens, and RL cuts the policy's steps at "
            f"rollout.max_turn_tokens = {max_turn_tokens}; set rollout.max_turn_tokens={longest}, or "
            "cold_start.num_demonstrations=0"
        )


def _well_answered(
    run: Run, played: Sequence[Trajectory], scores: Mapping[str, float | None], min_score: float
) -> list[Trajectory]:
    """Return a teacher's demonstrations with a sufficient score. Raises UserError without any."""
    failed = [attempt for attempt in played if attempt.answer is None]
    answered = [attempt for attempt in played if attempt.answer is not None]
    kept = [attempt for attempt in answered if (score := scores[attempt.id]) is not None and score >= min_score]
    if len(kept) < len(played):
        message = (
            f"{len(played) - len(kept)} of {len(played)} demonstrations are left out: {len(answered) - len(kept)} "
            f"score less than cold_start.min_score = {min_score:g}"
        )
        if failed:
            why = failed[0].failure or failed[0].stop_reason
            message += f", and {len(failed)} failed, first {failed[0].task.id}: {why}"
        if not kept:
            raise UserError(f"there is nothing to imitate: {message}")
        run.tell(message)
    return kept
