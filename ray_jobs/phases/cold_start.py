"""The cold start: the policy imitates demonstrations before RL."""

import asyncio
import random
from collections.abc import Mapping, Sequence

from configs.errors import UserError
from configs.learner import FileConfig, OwnDemonstrationsConfig, PlansConfig, TeacherConfig
from envs.datasets.sampler import cold_start_tasks
from learner.checkpoint import CheckpointError, newest_checkpoint
from ray_jobs.run.run import Run
from reward.collected import outcome_of
from rollout.filters import SOLVED
from rollout.types import Trajectory


class NoDemonstrationError(UserError):
    """What was played may not be imitated; the message says why."""


def cold_start(run: Run) -> Mapping[str, object]:
    """Supervised steps on demonstrations; then version 0 is published."""
    facts = run.finished("cold_start")
    if facts is None:
        facts = _imitate(run)
    with run.console.waiting("every rollout worker to take up the policy that RL begins with"):
        load_cold_start(run)
        run.supervisor.sync(run.publish(renumber=True))
    return facts


def load_cold_start(run: Run) -> None:
    """The cold-started policy into the learner, ready for RL. Raises CheckpointError where it is gone."""
    checkpoint, faults = newest_checkpoint(run.folder.cold_start)
    if checkpoint is None:
        why = faults[0].partition(";")[0] if faults else f"'{run.folder.cold_start}' holds no checkpoint"
        raise CheckpointError(
            f"the policy that RL begins with is gone: {why}; put the folder back, or begin anew under another name=..."
        )
    run.supervisor.learn("load_checkpoint", checkpoint.folder)
    run.supervisor.learn("begin_reinforcement")


def _imitate(run: Run) -> Mapping[str, object]:
    settings = run.config.cold_start
    nothing = isinstance(settings, PlansConfig) and not settings.num_demonstrations
    with run.phase("cold_start", total=0 if nothing else None) as phase:
        played = [] if nothing else _played(run)
        scores = {} if isinstance(settings, FileConfig) else scores_of(played)
        demonstrations = _kept(run, played, scores)
        phase.facts.update(_facts(demonstrations, scores, settings))
        run.supervisor.learn("begin_imitation")
        batches = _batches(demonstrations, settings, run.config.seed)
        phase.expect(len(batches))
        for step, batch in enumerate(batches):
            # Falling to zero: with a constant step size the policy would lean to whatever the last batches showed.
            rate = settings.learning_rate * (1 - step / len(batches))
            result = run.supervisor.learn("imitate_step", batch, rate)
            run.log_metrics(step, result.metrics)
            phase.advance(loss=result.metrics["cold_start/loss"])
        run.supervisor.learn("save_checkpoint", run.folder.cold_start)
    return phase.facts


def _played(run: Run) -> list[Trajectory]:
    return asyncio.run(run.rollouts.demonstrate(cold_start_tasks(run.config)))


def scores_of(played: Sequence[Trajectory]) -> Mapping[str, float | None]:
    """By the trajectory's id. Each is scored once: a scorer of one's own may take its time, and waver."""
    return {one.id: outcome_of(one) for one in played}


def _kept(run: Run, played: list[Trajectory], scores: Mapping[str, float | None]) -> list[Trajectory]:
    """Raises NoDemonstrationError."""
    settings = run.config.cold_start
    if isinstance(settings, TeacherConfig):
        kept, said = kept_demonstrations(played, scores, settings.min_score)
        run.tell(said)
        return kept
    check_played(played, run.config.rollout.max_turn_tokens)
    return played


def check_played(played: Sequence[Trajectory], max_turn_tokens: int) -> None:
    """Whether every plan was played to its answer in well-formed steps that the policy may write. Raises
    NoDemonstrationError."""
    broken = [one for one in played if one.stop_reason != "answered" or one.num_format_errors]
    if broken:
        first = broken[0]
        malformed = next((turn.format_error for turn in first.turns if turn.format_error), None)
        raise NoDemonstrationError(
            f"{len(broken)} of {len(played)} plans of the cold start did not reach their answer, first "
            f"{first.task.id}: {first.failure or malformed or first.stop_reason}; see that the tools of envs.actions "
            "work, raise rollout.engine.max_model_len where it ended as 'context', or set "
            "cold_start.num_demonstrations=0"
        )
    longest = [max((turn.num_tokens for turn in one.planner_turns), default=0) for one in played]
    if too_long := [length for length in longest if length > max_turn_tokens]:
        raise NoDemonstrationError(
            f"{len(too_long)} of {len(played)} plans of the cold start have a step of more than "
            f"rollout.max_turn_tokens = {max_turn_tokens} tokens, and in RL the policy's own are cut there; set "
            f"rollout.max_turn_tokens={max(too_long)}, or cold_start.num_demonstrations=0"
        )


def kept_demonstrations(
    played: Sequence[Trajectory], scores: Mapping[str, float | None], min_score: float
) -> tuple[list[Trajectory], str | None]:
    """Those of a teacher that are good enough, and what to say of the others. Raises NoDemonstrationError where none
    is."""
    answered = [one for one in played if one.answer is not None]
    kept = [one for one in answered if (score := scores[one.id]) is not None and score >= min_score]
    if len(kept) == len(played):
        return kept, None
    said = f"{len(played) - len(kept)} of {len(played)} demonstrations are left out: {len(answered) - len(kept)} score "
    said += f"less than cold_start.min_score = {min_score:g}"
    if len(answered) < len(played):
        first = next(one for one in played if one.answer is None)
        said += (
            f", and {len(played) - len(answered)} failed, first {first.task.id}: {first.failure or first.stop_reason}"
        )
    if not kept:
        raise NoDemonstrationError(f"there is nothing to imitate: {said}")
    return kept, said


def _facts(
    demonstrations: Sequence[Trajectory],
    scores: Mapping[str, float | None],
    settings: PlansConfig | OwnDemonstrationsConfig,
) -> dict[str, object]:
    facts: dict[str, object] = {"num_demonstrations": len(demonstrations)}
    if not isinstance(settings, FileConfig):
        facts["num_right"] = sum(scores[one.id] == SOLVED for one in demonstrations)
    if isinstance(settings, PlansConfig):
        facts["wrong_share"] = settings.wrong_share
    return facts


def _batches(
    demonstrations: Sequence[Trajectory], settings: PlansConfig | OwnDemonstrationsConfig, seed: int
) -> list[Sequence[Trajectory]]:
    """Plans come in the order of their tasks, which is a random one; other demonstrations anew in every pass."""
    size, items = settings.batch_demonstrations, list(demonstrations)
    if isinstance(settings, OwnDemonstrationsConfig):
        passes = (random.Random(f"imitation|{seed}|{number}") for number in range(settings.num_passes))
        items = [one for rng in passes for one in rng.sample(items, len(items))]
    return [items[start : start + size] for start in range(0, len(items), size)]
