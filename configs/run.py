"""A whole run, as a recipe describes it: its sections, its evaluations, and the cluster and cards it uses."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from configs.base import Config, MayChange, OwnPath
from configs.envs import EnvsConfig, Mix
from configs.errors import UserError
from configs.learner import (
    BOUNDED_LOSSES,
    ColdStartConfig,
    CustomLossConfig,
    LearnerConfig,
    ModelConfig,
    PlansConfig,
    TeacherConfig,
)
from configs.reward import CollectConfig, JudgeConfig, LabelConfig, PlanLabelConfig, PrmConfig, RewardConfig
from configs.rollout import (
    AgentConfig,
    BackendConfig,
    CommandAgentConfig,
    FolderMemoryConfig,
    FunctionAgentConfig,
    PlannerAgentConfig,
    RolloutConfig,
    VllmConfig,
)

TrackerName = Literal["wandb", "mlflow", "trackio"]
RANK_SHARE = 0.6
"""Share of a card for each of several ranks of a learner. NCCL refuses two ranks on one card; an engine still fits."""
BASE_SHARE = 0.01
"""Share of a card for the holder of shared base weights: Ray gives a process a card only with a share of it."""


class EvaluationConfig(Config):
    num_tasks: int = Field(default=300, ge=1)
    """Held-out tasks, at most those of a finite data set, on which the cold-started and the trained policy are
    compared, paired."""
    num_untouched_tasks: int = Field(default=100, ge=0)
    """Number of the same tasks, of each data set its share, that the untouched model also attempts."""
    mix: Mix | None = None
    """Data set name -> share of the held-out tasks; none takes envs.mix. What is only here is never trained on."""
    every_steps: MayChange[int] = Field(default=0, ge=0)
    """Train steps between evaluations on held-out tasks while training; 0 makes none. After the last step all held-out
    tasks are always evaluated."""
    while_training_tasks: int = Field(default=32, ge=1)
    """Held-out tasks that are attempted each time, of each data set its share; all if there are fewer."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature of `agentflow evaluate`; 0 is greedy, and several seeds need more. Training runs evaluate
    greedily."""
    judge: JudgeConfig | None = None
    """A language model that judges short answers which equal no reference; counted and reported apart."""


_NO_URL = (
    "a run joins a cluster from one of its machines: give host:port as `ray start` printed it, or send the run there "
    "with `agentflow submit --address URL`"
)


class ClusterConfig(Config):
    address: str | None = None
    """Ray cluster to join, `auto` or `host:port`; `local` starts one on this machine. None joins the one that
    RAY_ADDRESS names, as in every submitted job, and otherwise starts one on this machine."""
    dashboard: bool = False
    """Start the Ray dashboard on loopback, if the run starts its own cluster."""
    patience_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that the learner and the first rollout workers wait for room, such as a machine that starts on demand."""
    answer_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds without an answer, or without a new token while requests are open, after which a rollout worker is
    replaced. The limits of other parts, of starts and of first calls are multiples of it."""

    @property
    def work_s(self) -> float:
        """Return the limit of a call of the learner and of the PRM, in seconds."""
        return 6 * self.answer_s

    @property
    def start_s(self) -> float:
        """Return the limit of a start and of the first call of each kind, in seconds: it may compile or download."""
        return 12 * self.answer_s

    @property
    def joined(self) -> str | None:
        """Return the address of the cluster that the run joins; None if it starts one."""
        address = (self.address or os.environ.get("RAY_ADDRESS", "")).strip() or "local"
        return None if address == "local" else address

    def check_joined(self) -> None:
        """Raise UserError if RAY_ADDRESS names a dashboard, as for `agentflow submit`, which no run can join."""
        if (address := self.joined) and "://" in address:
            raise UserError(f"RAY_ADDRESS is a URL: {_NO_URL}, or set cluster.address=local to run here")

    @field_validator("address")
    @classmethod
    def _can_be_joined(cls, address: str | None) -> str | None:
        if address is not None and "://" in address:
            raise ValueError(_NO_URL)
        return address


class CardConfig(Config):
    shared: bool = False
    """Put the learner, the PRM and the first rollout worker on one card, which they divide by their shares; otherwise
    each goes to any card that has its share free. It has no effect if the learner or the engine is on the CPU, or uses
    several cards."""
    share_base: bool = False
    """Let the learner and the first rollout worker read one copy of the base weights, which a separate process holds on
    the card that they share; its share, a hundredth of the card, comes from the learner's. On CPUs it saves nothing.
    """
    learner: float = Field(default=0.4, gt=BASE_SHARE, le=1)
    """The learner's share of a card, on `cuda`."""
    engine: float = Field(default=0.4, gt=0, le=1)
    """A rollout worker's share of a card, on `cuda`."""
    prm: float = Field(default=0.1, ge=0, le=1)
    """The PRM's share of a card, on `cuda`; 0 if a recipe has none."""

    @model_validator(mode="after")
    def _one_card_is_enough(self) -> "CardConfig":
        total = self.learner + self.engine + self.prm
        if self.shared and total > 1 + 1e-9:
            raise ValueError(f"card.learner + engine + prm = {total:g} is more than the one card they share; at most 1")
        return self


class RunConfig(Config):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Folder of the run below `output_dir`."""
    output_dir: OwnPath = "runs"
    """Folder of all runs, from the one the command is called in."""
    seed: int = Field(default=0, ge=0)
    """Decides tasks, demonstrations, the adapter's start and sampling; use the same for runs that are compared."""
    num_steps: int = Field(default=12, ge=0)
    """Train steps (optimizer steps of the RL phase)."""
    batch_groups: int = Field(default=4, ge=1)
    """Groups with signal per train step (B); fewer if less than a quarter of the groups have signal."""
    pipeline_depth: int = Field(default=1, ge=0)
    """Batches that rollouts may run ahead (D). 0 is synchronous and, for the planner on a CPU, bit-reproducible."""
    max_staleness: int = Field(default=8, ge=0)
    """Tokens of weights that are more train steps old than this are left out of the loss (S)."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Tasks to draw at most: the run ends when all of them are trained or dropped."""
    max_empty_batches: MayChange[int] = Field(default=10, ge=1)
    """Train no further when the groups of this many batches in a row carried no signal."""
    code_path: MayChange[str | None] = None
    """Folder with the modules that the recipe names as `module:name`; none: that of the recipe. The folder where the
    command is called is searched as well."""
    trackers: MayChange[tuple[TrackerName, ...]] = ()
    """Experiment trackers that receive every metric, in addition to TensorBoard; each needs the extra of its name."""
    model: ModelConfig = ModelConfig()
    envs: EnvsConfig = EnvsConfig()
    agent: AgentConfig = PlannerAgentConfig()
    """The built-in planner with its settings, or a custom agent."""
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    collect: CollectConfig = CollectConfig()
    label: LabelConfig = PlanLabelConfig()
    """Source of the labels of steps that the PRM learns from."""
    prm: PrmConfig = PrmConfig()
    learner: LearnerConfig = LearnerConfig()
    cold_start: ColdStartConfig = PlansConfig()
    """Demonstrations that the policy imitates before RL."""
    evaluation: EvaluationConfig = EvaluationConfig()
    card: MayChange[CardConfig] = CardConfig()
    cluster: MayChange[ClusterConfig] = ClusterConfig()
    backend: BackendConfig = VllmConfig()
    """Model of `solve` and `evaluate`; training always samples in its own engines."""

    @property
    def planner(self) -> PlannerAgentConfig:
        """The settings of the built-in planner, which are the defaults for a custom agent."""
        return self.agent if isinstance(self.agent, PlannerAgentConfig) else PlannerAgentConfig()

    @property
    def in_lockstep(self) -> bool:
        """True if the turns of all trajectories are sampled together. A custom agent may call at any time."""
        return self.pipeline_depth == 0 and isinstance(self.agent, PlannerAgentConfig) and self.agent.lockstep

    @property
    def run_path(self) -> Path:
        """The run's folder, relative where `output_dir` is."""
        return Path(self.output_dir) / self.name

    @property
    def shares_card(self) -> bool:
        """True if learner, PRM and first rollout worker divide one card that is reserved for them."""
        learner, engine = self.learner, self.rollout.engine
        alone = learner.num_workers == 1 and engine.tensor_parallel == 1
        return self.card.shared and alone and learner.device == engine.device == "cuda"

    @property
    def shares_base(self) -> bool:
        """True if learner and first rollout worker read one copy of the base weights, on one card or on one machine."""
        return self.card.share_base and (self.shares_card or self.cluster.joined is None)

    @property
    def trains_prm(self) -> bool:
        """True if a run first trains a process reward model: its credit needs one, and the recipe names none."""
        return self.reward.prm is not None and self.reward.prm_path is None

    @property
    def names_code(self) -> bool:
        """True if the recipe names custom modules."""
        tools = any(not tool.is_mcp for tool in self.envs.tools.values())
        rewards = self.reward.scorer or self.reward.turn_scorer
        scorers = rewards or any(not (one.is_hub or one.is_file) or one.scorer for one in self.envs.datasets.values())
        agent = isinstance(self.agent, FunctionAgentConfig | CommandAgentConfig)
        others = isinstance(self.learner.loss, CustomLossConfig) or isinstance(self.cold_start, TeacherConfig)
        return bool(tools or scorers or agent or others)

    def evaluates_after(self, step: int) -> bool:
        """Return True if held-out tasks are attempted between this train step and the next."""
        every = self.evaluation.every_steps
        return every > 0 and step % every == 0 and step < self.num_steps

    @property
    def evaluation_mix(self) -> dict[str, float]:
        """The shares of the held-out tasks."""
        return self.envs.mix if self.evaluation.mix is None else self.evaluation.mix

    @model_validator(mode="after")
    def _base_weights_are_there(self) -> "RunConfig":
        learner, engine, card = self.learner, self.rollout.engine, self.card
        asks_base = "base_generator" in self.envs.actions and self.envs.base_generator is None
        reads_base = {
            "agent.verifier/generator = 'model'": "model" in (self.planner.verifier, self.planner.generator),
            "envs.actions with 'base_generator' and no envs.base_generator": asks_base and self.backend.type == "vllm",
            "card.share_base": card.share_base,
        }
        for setting, is_set in reads_base.items():
            if is_set and engine.adapter_mode == "merged":
                raise ValueError(
                    f"{setting} needs rollout.engine.adapter_mode = 'native': a merged engine holds no frozen weights"
                )
        on_cpu = learner.device == engine.device == "cpu" and learner.num_workers == 1
        if card.share_base and not (self.shares_card or on_cpu):
            raise ValueError(
                "card.share_base needs card.shared = true with learner.device and rollout.engine.device = 'cuda', or "
                "both on the CPU; and learner.num_workers and rollout.engine.tensor_parallel = 1"
            )
        if card.share_base and learner.precision != engine.precision:
            raise ValueError(
                f"card.share_base needs one type for both, and learner.dtype is {learner.precision}, "
                f"rollout.engine.dtype {engine.precision}: set them to the same"
            )
        return self

    @model_validator(mode="after")
    def _agent_fits(self) -> "RunConfig":
        cold_start, agent = self.cold_start, f"agent.type = '{self.agent.type}' needs"
        is_planner = isinstance(self.agent, PlannerAgentConfig)
        if is_planner and not isinstance(cold_start, PlansConfig):
            raise ValueError(
                f"cold_start.type = '{cold_start.type}' needs a custom agent (agent.function or agent.command): the "
                "planner imitates plans"
            )
        if not is_planner and isinstance(cold_start, PlansConfig) and cold_start.num_demonstrations:
            raise ValueError(
                f"{agent} cold_start.type = 'teacher' or 'file', or cold_start.num_demonstrations = 0: only the "
                "planner imitates plans"
            )
        if not is_planner and self.backend.type != "vllm":
            raise ValueError(f"{agent} backend = vllm: a served model does not report token ids")
        return self

    @model_validator(mode="after")
    def _loss_fits(self) -> "RunConfig":
        loss, correction, credit = self.learner.loss.type, self.learner.correction, self.reward.credit.type
        if loss in BOUNDED_LOSSES and correction != "none":
            raise ValueError(
                f"learner.loss.type = '{loss}' bounds the ratio itself, and learner.correction = '{correction}' "
                "would bound it a second time: set learner.correction=none"
            )
        if loss == "dr_grpo" and credit != "outcome_centered":
            raise ValueError(
                f"learner.loss.type = 'dr_grpo' needs reward.credit.type = 'outcome_centered', not '{credit}': its "
                "advantages are not divided by the group's deviation"
            )
        if credit == "outcome_guided" and self.pipeline_depth == 0:
            raise ValueError(
                "reward.credit.type = 'outcome_guided' needs pipeline_depth >= 1, not 0: guided attempts are not "
                "part of a synchronous run's rounds; or set reward.credit=outcome"
            )
        return self

    @model_validator(mode="after")
    def _rollouts_fit(self) -> "RunConfig":
        most = max(self.rollout.num_workers, self.rollout.max_workers or 0)
        if isinstance(self.planner.memory, FolderMemoryConfig) and most > 1:
            raise ValueError(
                f"agent.memory.type = 'folder' is for one rollout worker, and there may be {most}: use "
                "agent.memory.type=server with the url of a Qdrant server"
            )
        if (self.rollout.max_workers or most) < most:
            raise ValueError(
                f"rollout.max_workers = {self.rollout.max_workers} is below rollout.num_workers = {most}, with which a "
                "run starts: raise it, or leave it out"
            )
        if self.max_staleness < self.pipeline_depth:
            raise ValueError(
                f"max_staleness = {self.max_staleness} is below pipeline_depth = {self.pipeline_depth}: ordinary "
                "rollouts would be left out of the loss"
            )
        turns = self.planner.max_steps if isinstance(self.agent, PlannerAgentConfig) else 1
        needed, room = turns * self.rollout.max_turn_tokens, self.rollout.engine.max_model_len
        if needed >= room:
            product = "agent.max_steps * " * isinstance(self.agent, PlannerAgentConfig) + "rollout.max_turn_tokens"
            raise ValueError(
                f"{product} = {needed} leaves no room for prompts in rollout.engine.max_model_len = {room}; lower the "
                "former or raise the latter"
            )
        return self
