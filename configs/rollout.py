"""The agent acting: groups, turns, the engine that samples, the frozen modules, memory across episodes."""

from typing import Literal

from pydantic import Field, HttpUrl, TypeAdapter, model_validator

from configs.api_keys import exposed_key
from configs.base import Config
from configs.judge import LOOPBACK
from configs.processor import Precision, fastest_precision


class ModuleConfig(Config):
    kind: Literal["rule", "model"] = "rule"
    """`rule` needs no model; `model` asks the frozen base model (never the trained adapter)."""
    max_tokens: int = Field(default=64, ge=1)
    """Length limit of a model's verdict or answer."""


class EngineConfig(Config):
    device: Literal["cpu", "cuda"] = "cpu"
    """`cuda` needs a GPU and the `gpu` extra."""
    adapter_mode: Literal["merged", "native"] = "merged"
    """`merged`: adapter folded into the weights (CPU). `native`: versioned adapters (GPU)."""
    refresh: Literal["turn", "trajectory"] = "turn"
    """When a trajectory takes up new weights: at its next `turn`, or never (`trajectory`; needs `native`)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Weights and activations of the engine; `auto`: bfloat16 on a GPU, and on a CPU whichever it multiplies faster."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Cards of one machine over which each engine spreads every layer, for a model that one card does not hold. Beyond
    1 it needs `cuda` and `native`, and an engine has its cards for itself."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Requests decoded together."""
    max_model_len: int = Field(default=1024, ge=64)
    """Tokens of prompt and completion together."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for the KV cache."""
    num_threads: int = Field(default=2, ge=1)
    """CPU threads of the engine."""
    metrics: bool = False
    """Send vLLM's own metrics through Ray's, for Prometheus; they cost a little time in every engine step."""

    @property
    def precision(self) -> Precision:
        """What `dtype` means on this machine."""
        return fastest_precision(self.device) if self.dtype == "auto" else self.dtype

    @model_validator(mode="after")
    def _pinning_needs_several_versions(self) -> "EngineConfig":
        if self.refresh == "trajectory" and self.adapter_mode == "merged":
            raise ValueError("refresh = 'trajectory' needs adapter_mode = 'native': a merged engine has one version")
        return self

    @model_validator(mode="after")
    def _spread_engines_are_on_cards(self) -> "EngineConfig":
        if self.tensor_parallel > 1 and (self.device, self.adapter_mode) != ("cuda", "native"):
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} needs device = 'cuda' and adapter_mode = 'native', not "
                f"'{self.device}' and '{self.adapter_mode}': merged weights are replaced in one process only"
            )
        return self


class RolloutConfig(Config):
    group_size: int = Field(default=8, ge=2)
    """Trajectories per task (G). A group of one has no baseline, so 2 is the least."""
    num_workers: int = Field(default=1, ge=1)
    """Rollout workers, each with an engine of its own; the run begins when so many are there."""
    max_workers: int | None = Field(default=None, ge=1)
    """More workers are added up to so many while the run goes on, wherever the cluster has room; none adds none."""
    max_steps: int = Field(default=5, ge=1)
    """Planner steps per task (K); the last one may only answer."""
    max_turn_tokens: int = Field(default=64, ge=8)
    """Tokens of one planner turn; a longer one is cut and counts as a format error."""
    format_retries: int = Field(default=1, ge=0)
    """Extra tries per step after a malformed turn, before the step is spent."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature in training; evaluation is greedy."""
    lockstep: bool = True
    """At pipeline_depth 0: sample all trajectories' turns together, which makes a run bit-reproducible. Without it a
    turn is sampled as soon as it is asked for: faster where tools are slow, and no two runs are the same."""
    max_attempts: int = Field(default=6, ge=1)
    """Tries at one group whose worker died or that could not be scored, before it has failed."""
    episode_timeout_s: float = Field(default=300.0, gt=0)
    """Wall-clock limit of one trajectory; beyond it the trajectory is unscorable, not wrong."""
    verifier: ModuleConfig = ModuleConfig()
    generator: ModuleConfig = ModuleConfig()
    engine: EngineConfig = EngineConfig()


IN_PROCESS = ":memory:"


class MemoryConfig(Config):
    enabled: bool = False
    """Remember trajectories that were right in training, and show what they did as hints for similar tasks."""
    location: str = Field(default=IN_PROCESS, min_length=1)
    """Where Qdrant keeps them: `:memory:` (each worker its own, gone with it), a folder (for one worker), or the
    address of a Qdrant server, http://host:port (for all workers together)."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the server's API key; none sends no key."""
    collection: str = Field(default="agentflow_experience", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Name of the Qdrant collection."""
    top_k: int = Field(default=3, ge=1, le=20)
    """Hints per task at most."""
    min_similarity: float = Field(default=0.5, ge=-1, le=1)
    """Cosine similarity of two questions from which on one is a hint for the other."""
    max_entry_chars: int = Field(default=300, ge=50, le=4000)
    """Length limit of one hint."""
    max_entries: int = Field(default=10_000, ge=1)
    """When so many are kept, further ones are not added."""
    in_evaluation: bool = False
    """Show hints in evaluations and to `solve` too. Without it they measure the policy alone."""

    @property
    def is_server(self) -> bool:
        return self.location.startswith(("http://", "https://"))

    @property
    def serves_one_worker(self) -> bool:
        return not self.is_server and self.location != IN_PROCESS

    @model_validator(mode="after")
    def _key_goes_to_a_server_and_safely(self) -> "MemoryConfig":
        if self.is_server and (where := exposed_key(self.location)):
            raise ValueError(
                f"location holds what looks like a key, {where}; name its variable with api_key_env instead"
            )
        if self.api_key_env is None:
            return self
        if not self.is_server:
            raise ValueError(f"api_key_env is for a Qdrant server, but location is '{self.location}'")
        url = TypeAdapter(HttpUrl).validate_python(self.location)
        if url.scheme != "https" and url.host not in LOOPBACK:
            raise ValueError(f"location {self.location} would send the key in clear text: use https")
        return self
