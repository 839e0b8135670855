"""A whole run: what a recipe describes."""

from pydantic import Field, model_validator

from configs.base import Config
from configs.cluster import ClusterConfig
from configs.envs import EnvsConfig
from configs.learner import ColdStartConfig, LearnerConfig
from configs.model import ModelConfig
from configs.reward import CollectConfig, LabelConfig, PrmConfig, RewardConfig
from configs.rollout import RolloutConfig


class EvaluationConfig(Config):
    num_tasks: int = Field(default=300, ge=1)
    """Held-out tasks on which the cold-started and the trained policy are compared, paired."""
    num_untouched_tasks: int = Field(default=100, ge=0)
    """The first so many of the same tasks are also given to the untouched model."""


class RunConfig(Config):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run below `output_dir`."""
    output_dir: str = "runs"
    seed: int = Field(default=0, ge=0)
    num_steps: int = Field(default=12, ge=0)
    """Train steps (optimizer steps of the RL phase)."""
    batch_groups: int = Field(default=4, ge=1)
    """Groups with signal per train step (B)."""
    pipeline_depth: int = Field(default=1, ge=0)
    """Batches that rollouts may run ahead (D). 0 is synchronous and bit-reproducible."""
    max_staleness: int = Field(default=8, ge=0)
    """Tokens that are more versions older than the learner than this are left out of the loss (S)."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Tasks to draw at most: the run ends when all of them are trained or dropped, however few steps that took."""
    max_empty_batches: int = Field(default=10, ge=1)
    """Abort when so many batches' worth of groups in a row carried no signal."""
    model: ModelConfig = ModelConfig()
    envs: EnvsConfig = EnvsConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    collect: CollectConfig = CollectConfig()
    label: LabelConfig = LabelConfig()
    prm: PrmConfig = PrmConfig()
    learner: LearnerConfig = LearnerConfig()
    cold_start: ColdStartConfig = ColdStartConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _frozen_modules_have_frozen_weights(self) -> "RunConfig":
        kinds = (self.rollout.verifier.kind, self.rollout.generator.kind)
        if "model" in kinds and self.rollout.engine.adapter_mode == "merged":
            raise ValueError(
                "rollout.verifier/generator.kind = 'model' needs rollout.engine.adapter_mode = 'native': "
                "a merged engine holds no frozen weights to ask"
            )
        return self

    @model_validator(mode="after")
    def _cap_is_above_the_depth(self) -> "RunConfig":
        if self.max_staleness < self.pipeline_depth:
            raise ValueError(
                f"max_staleness = {self.max_staleness} is below pipeline_depth = {self.pipeline_depth}: ordinary "
                "rollouts would be left out of the loss"
            )
        return self

    @model_validator(mode="after")
    def _turns_fit_the_context(self) -> "RunConfig":
        needed = self.rollout.max_steps * self.rollout.max_turn_tokens
        if needed >= self.rollout.engine.max_model_len:
            raise ValueError(
                f"rollout.max_steps * max_turn_tokens = {needed} leaves no room for prompts in "
                f"rollout.engine.max_model_len = {self.rollout.engine.max_model_len}"
            )
        return self
