"""The process reward model as an actor: trained once, then called for every group with signal."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import ray

from actors.cluster import Handle
from actors.heartbeat import Watched
from configs.api_keys import redact_output
from configs.reward import PrmConfig
from envs.kernel import return_memory
from reward.judging import PrmError
from reward.prm.model import ProcessRewardModel
from reward.prm.step_text import StepText, step_texts
from reward.prm.training import LabelledStep, train_prm
from rollout.engines.engine import Pulse
from rollout.types import Group, StepScores

SCORED_AT_ONCE = 64
"""Steps per call of the model, which share the computation of common prefixes. After each the pulse shows progress."""


class Prm(Watched):
    """Holds the process reward model, with the weights in `trained` if there are any, as in a resumed run.

    It scores in a thread, one call at a time. The buffer bounds the queue: a group that waits holds a place there.
    """

    def __init__(self, config: PrmConfig, model_path: Path, seed: int, trained: Path) -> None:
        redact_output()
        self._seed = seed
        self._trained = trained
        self._untrained = partial(ProcessRewardModel, model_path, config, seed=seed)
        self._prm = self._untrained()
        self._in_turn = asyncio.Lock()
        self._num_open = self._num_scored = 0
        if trained.exists():
            self._prm.load(trained)

    async def sees(self, check: Callable[[], bool]) -> bool:
        """Return the result of a check in this process, for example whether it sees the run folder."""
        return check()

    async def heartbeat(self) -> Pulse:
        """Return the number of steps scored so far, and of those that wait: the thread may hang while this answers."""
        return Pulse(done=self._num_scored, num_open=self._num_open)

    async def train(self, steps: Sequence[LabelledStep]) -> AsyncIterator[float]:
        """Train, always from the untrained model, and yield the loss of every optimizer step."""
        del self._prm  # never two models in memory
        self._prm = self._untrained()
        for loss in train_prm(self._prm, steps, seed=self._seed):
            yield loss
        return_memory()  # scoring takes a third of what training took

    async def save(self, folder: Path, facts: Mapping[str, object]) -> str:
        self._prm.save(folder, **facts)
        return self._prm.digest

    async def score(self, steps: Sequence[StepText]) -> list[float | None]:
        """Return the scores of steps. The steps of one call are scored together, so scores repeat bit for bit."""
        scores: list[float | None] = []
        self._num_open += len(steps)
        try:
            async with self._in_turn:
                for start in range(0, len(steps), SCORED_AT_ONCE):
                    found = await asyncio.to_thread(self._prm.score, steps[start : start + SCORED_AT_ONCE])
                    scores += found
                    self._num_scored += len(found)
        finally:
            self._num_open -= len(steps)
        return scores

    async def score_group(self, group: Group, digest: str | None = None) -> StepScores:
        """Return raw scores of every planner turn.

        Raise PrmError if the model is broken, or without weights of this digest, as after a restart without them.
        """
        if digest not in (None, self._prm.digest):
            raise PrmError(
                f"the PRM has the weights {self._prm.digest[:12] or '(untrained)'}, and those of the run are "
                f"{digest[:12]}: its node does not see '{self._trained}'"
            )
        steps = [step_texts(trajectory) for trajectory in group.trajectories]
        # Each text once: the candidates of a guided decision share all earlier steps.
        distinct = {step.digest: step for trajectory in steps for step in trajectory}
        scores = dict(zip(distinct, await self.score(list(distinct.values())), strict=True))
        raw = tuple(tuple(scores[step.digest] for step in trajectory) for trajectory in steps)
        return StepScores(raw=raw, prm_digest=self._prm.digest)


PrmActor = ray.remote(Prm)


class RemotePrm:
    """Calls of the actor that wait for their result, for training and measuring."""

    def __init__(self, actor: Handle) -> None:
        self._actor = actor

    def train(self, steps: Sequence[LabelledStep]) -> Iterator[float]:
        for loss in self._actor.train.remote(steps):
            yield ray.get(loss)

    def save(self, folder: Path, facts: Mapping[str, object]) -> str:
        return str(ray.get(self._actor.save.remote(folder, facts)))

    def score(self, steps: Iterable[StepText]) -> list[float | None]:
        return list(ray.get(self._actor.score.remote(list(steps))))
