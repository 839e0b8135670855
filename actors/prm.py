"""The process reward model as an actor: trained once, then asked about every group with signal."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from configs.reward import PrmConfig
from reward.prm.decoys import canaries
from reward.prm.model import ProcessRewardModel
from reward.prm.scorer import PrmScorer
from reward.prm.step_text import StepText
from reward.prm.training import LabelledStep, train_prm
from reward.types import PrmError
from rollout.engines.engine import Pulse
from rollout.types import Group

if TYPE_CHECKING:
    from actors.handles import PrmHandle


@ray.remote(max_restarts=-1)
class PrmActor:
    """Ray starts it again when it dies; it then takes up the weights in `trained`, where there are any. Whoever asked
    it meanwhile asks again: no score is ever made up."""

    def __init__(self, config: PrmConfig, model_path: Path, seed: int, trained: Path) -> None:
        self._seed = seed
        self._trained = trained
        self._untrained = partial(ProcessRewardModel, model_path, config, seed=seed)
        self._take(self._untrained())
        if trained.exists():
            self._prm.load(trained)

    def __repr__(self) -> str:
        return "PRM"

    async def ready(self) -> bool:
        return True

    async def heartbeat(self) -> Pulse:
        """Through the scoring, whose thread may hang while this actor answers."""
        return self._scorer.pulse

    async def load(self, folder: Path) -> str:
        """Take a trained PRM's weights; returns their digest. Scores of other weights are forgotten."""
        self._prm.load(folder)
        self._take(self._prm)
        return self._prm.digest

    async def train(self, steps: Sequence[LabelledStep]) -> AsyncIterator[float]:
        """The loss of every optimizer step, as it is done. Begins untrained, whatever weights were loaded before: a
        training that was cut off behind its save must not be followed by a second one on top."""
        del self._prm, self._scorer  # never two models in memory
        self._take(self._untrained())
        for loss in train_prm(self._prm, steps, seed=self._seed):
            yield loss

    async def save(self, folder: Path, facts: Mapping[str, object]) -> str:
        self._prm.save(folder, **facts)
        return self._prm.digest

    async def score(self, steps: Sequence[StepText]) -> list[float | None]:
        return await self._scorer.score(steps)

    async def score_group(self, group: Group, digest: str | None = None) -> StepScores:
        """Raises PrmError where its weights are not those of this digest: one that was started again on a machine that
        does not see them has none."""
        if digest not in (None, self._prm.digest):
            raise PrmError(
                f"the PRM has the weights {self._prm.digest[:12] or 'of nobody'}, and those of the run are "
                f"{digest[:12]}: its machine does not see '{self._trained}'"
            )
        return await self._scorer.score_group(group)

    async def score_canaries(self, step: StepText) -> dict[str, float | None]:
        """The score of every junk decision in the place of this step's."""
        junk = canaries(step)
        return dict(zip(junk, await self._scorer.score(list(junk.values())), strict=True))

    def _take(self, prm: ProcessRewardModel) -> None:
        """With an empty cache: what other weights scored is forgotten."""
        self._prm, self._scorer = prm, PrmScorer(prm)


class RemotePrm:
    """The actor as training and measuring know it: each call waits for its answer."""

    def __init__(self, actor: "PrmHandle") -> None:
        self._actor = actor

    def train(self, steps: Sequence[LabelledStep]) -> Iterator[float]:
        for loss in self._actor.train.remote(steps):
            yield ray.get(loss)

    def save(self, folder: Path, facts: Mapping[str, object]) -> str:
        return ray.get(self._actor.save.remote(folder, facts))

    def load(self, folder: Path) -> str:
        return ray.get(self._actor.load.remote(folder))

    def score(self, steps: Iterable[StepText]) -> list[float | None]:
        return ray.get(self._actor.score.remote(list(steps)))
