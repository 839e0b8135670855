"""The agent acting: who it is, its prompt, groups, turns, the engine that samples, frozen modules, its memory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from configs.api_keys import exposed_key, in_clear_text
from configs.base import Config, OwnPath, typed
from configs.own import ImportPath
from configs.processor import Dtype, Precision, precision_of
from configs.wording import reason


class RuleConfig(Config):
    """Needs no model."""

    type: Literal["rule"] = "rule"


class FrozenModelConfig(Config):
    """Asks the frozen base model, never the trained adapter."""

    type: Literal["model"] = "model"
    max_tokens: int = Field(default=64, ge=1)
    """Length limit of its verdict or answer."""


ModuleConfig = Annotated[RuleConfig | FrozenModelConfig, Field(discriminator="type"), typed("rule")]


class EngineConfig(Config):
    device: Literal["cpu", "cuda"] = "cpu"
    """`cuda` needs a GPU and the `gpu` extra."""
    adapter_mode: Literal["merged", "native"] = "merged"
    """`merged`: adapter folded into the weights (CPU). `native`: versioned adapters (GPU)."""
    dtype: Dtype = "auto"
    """Weights and activations of the engine; `auto`: bfloat16 on a GPU, and on a CPU whichever it multiplies faster."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Cards of one machine over which each engine spreads every layer, for a model that one card does not hold. Beyond
    1 it needs `cuda` and `native`, and an engine has its cards for itself."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Requests decoded together."""
    max_model_len: int = Field(default=1024, ge=64)
    """Tokens of prompt and completion together."""
    kv_cache_gib: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Memory for the KV cache."""
    num_threads: int = Field(default=2, ge=1)
    """CPU threads of the engine."""
    metrics: bool = False
    """Send vLLM's own metrics through Ray's, for Prometheus; they cost a little time in every engine step."""

    @property
    def precision(self) -> Precision:
        """What `dtype` means on this machine."""
        return precision_of(self.dtype, self.device)

    @property
    def adapter_precision(self) -> Precision:
        """What adapters are published in. A native adapter is rounded to the engine's type anyway; a merged one is
        multiplied out in float32 before it is."""
        return self.precision if self.adapter_mode == "native" else "float32"

    @model_validator(mode="after")
    def _spread_engines_are_on_cards(self) -> "EngineConfig":
        if self.tensor_parallel > 1 and (self.device, self.adapter_mode) != ("cuda", "native"):
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} needs device = 'cuda' and adapter_mode = 'native', not "
                f"'{self.device}' and '{self.adapter_mode}': merged weights are replaced in one process only"
            )
        return self


_STEP = ("thought", "action", "action_input")


def _read_examples(value: Any) -> Any:
    """A path is replaced by what its file holds, so that a run keeps what it began with. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        lines = Path(value).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"'{value}' cannot be read: {reason(error)}") from None
    found = [_example(line, f"'{value}', line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"'{value}' holds no example; write one JSON object a line, or leave it out")
    return found


def _example(line: str, place: str) -> str:
    """A solved task as the planner reads it."""
    try:
        row = json.loads(line)
        question, steps = row["question"], row["steps"]
        shown = [_step(step, last=number == len(steps)) for number, step in enumerate(steps, start=1)]
        if not isinstance(question, str) or not shown:
            raise ValueError
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f'{place} must be {{"question": ..., "steps": [...]}} whose steps have thought, action, action_input and '
            "result; the last one's action is answer, without a result"
        ) from None
    return "\n".join((f"Task: {question}", *shown))


def _step(step: Mapping[str, Any], *, last: bool) -> str:
    decision = json.dumps({name: step[name] for name in _STEP}, ensure_ascii=False, separators=(",", ":"))
    if last != (step["action"] == "answer") or last == ("result" in step):
        raise ValueError
    return decision if last else f"{decision}\nResult: {step['result']}"


class PromptConfig(Config):
    """The head of the planner's prompt. An agent of one's own has a prompt of its own."""

    instructions: str = "Solve the task step by step with tools. Reply in JSON: thought, action, action_input."
    """What it begins with; the tools follow, one a line."""
    examples: Annotated[tuple[str, ...], BeforeValidator(_read_examples)] = ()
    """Solved tasks, which follow the tools: texts, or the path of a file with one JSON object a line, `question` and
    `steps`, which is read at once; the run folder keeps what it held."""


class RolloutConfig(Config):
    group_size: int = Field(default=8, ge=2)
    """Trajectories per task (G). A group of one has no baseline, so 2 is the least."""
    num_workers: int = Field(default=1, ge=1)
    """Rollout workers, each with an engine of its own; the run begins when so many are there."""
    max_workers: int | None = Field(default=None, ge=1)
    """More workers are added up to so many while the run goes on, wherever the cluster has room; none adds none."""
    max_turn_tokens: int = Field(default=64, ge=8)
    """Tokens of one reply. A longer one is cut; of the planner it counts as a format error."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature in training; evaluation is greedy."""
    max_attempts: int = Field(default=6, ge=1)
    """Tries at one group whose worker died or that could not be scored, before it has failed."""
    episode_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds of one trajectory without those in which it waits for the engine; beyond them it is unscorable, not
    wrong."""
    engine: EngineConfig = EngineConfig()


class NoMemoryConfig(Config):
    """Nothing is remembered."""

    type: Literal["none"] = "none"


class HintsConfig(Config):
    """Trajectories that were right in training are kept, and show what they did as hints for similar tasks."""

    top_k: int = Field(default=3, ge=1, le=20)
    """Hints per task at most."""
    min_similarity: float = Field(default=0.5, ge=-1, le=1)
    """Cosine similarity of two questions from which on one is a hint for the other."""
    max_entries: int = Field(default=10_000, ge=1)
    """When so many are kept, further ones are not added."""
    in_evaluation: bool = False
    """Show hints in evaluations and to `solve` too. Without it they measure the policy alone."""


class InProcessMemoryConfig(HintsConfig):
    """Each worker has a memory of its own, gone with it."""

    type: Literal["in_process"] = "in_process"


class FolderMemoryConfig(HintsConfig):
    """Qdrant in a folder, for one worker."""

    type: Literal["folder"] = "folder"
    path: OwnPath = Field(min_length=1)
    """The folder."""
    collection: str = Field(default="agentflow_experience", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Name of the Qdrant collection."""


class ServerMemoryConfig(HintsConfig):
    """A Qdrant server, for all workers together."""

    type: Literal["server"] = "server"
    url: str = Field(pattern=r"^https?://\S+$")
    """Its address, http://host:port."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the server's API key; none sends no key."""
    collection: str = Field(default="agentflow_experience", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Name of the Qdrant collection."""

    @model_validator(mode="after")
    def _key_goes_safely(self) -> "ServerMemoryConfig":
        if where := exposed_key(self.url):
            raise ValueError(f"url holds what looks like a key, {where}; name its variable with api_key_env instead")
        if in_clear_text(self.url) and self.api_key_env is not None:
            raise ValueError(f"url {self.url} would send the key in clear text: use https")
        return self


MemoryConfig = Annotated[
    NoMemoryConfig | InProcessMemoryConfig | FolderMemoryConfig | ServerMemoryConfig,
    Field(discriminator="type"),
    typed("none"),
]


class PlannerAgentConfig(Config):
    """The built-in planner with its tools, verifier and generator."""

    type: Literal["planner"] = "planner"
    prompt: PromptConfig = PromptConfig()
    max_steps: int = Field(default=5, ge=1)
    """Planner steps per task (K); the last one may only answer."""
    format_retries: int = Field(default=1, ge=0)
    """Extra tries per step after a malformed turn, before the step is spent."""
    verifier: ModuleConfig = RuleConfig()
    """Decides after each step whether the task is done."""
    generator: ModuleConfig = RuleConfig()
    """Writes the answer if the planner gave none."""
    memory: MemoryConfig = NoMemoryConfig()
    """What is remembered from one task to the next."""
    lockstep: bool = True
    """At pipeline_depth 0, sample the turns of all trajectories together, which makes a run on a CPU bit-reproducible.
    Otherwise each turn is sampled as soon as it is requested: faster with slow tools, but not reproducible."""


class OwnAgentConfig(Config):
    """What every agent of one's own has."""

    model: str = Field(default="policy", min_length=1)
    """Name under which the endpoint offers the policy; a call with another one is refused."""
    sampling: Literal["refuse", "override"] = "refuse"
    """What becomes of a call whose temperature is not `rollout.temperature`, or that asks for top_p, penalties or a
    logit bias: it is refused, or sampled as the recipe says all the same."""


class FunctionAgentConfig(OwnAgentConfig):
    """A function in the rollout worker's process."""

    type: Literal["function"] = "function"
    function: ImportPath
    """`module:name` of `async def name(task, client) -> str`, which returns its answer; `client` is an
    `openai.AsyncOpenAI` for the endpoint. A plain function is called in a thread, with an `openai.OpenAI`."""


class CommandAgentConfig(OwnAgentConfig):
    """A program in a process of its own, one for each attempt."""

    type: Literal["command"] = "command"
    command: str = Field(min_length=1)
    """The program and its arguments; files are looked for beside the recipe. It reads the task as JSON from its input,
    and prints its answer as the last line. `OPENAI_BASE_URL`, `OPENAI_API_KEY` and `OPENAI_MODEL` name the endpoint."""

    @field_validator("command")
    @classmethod
    def _holds_no_key(cls, command: str) -> str:
        if where := exposed_key(command):
            raise ValueError(
                f"it holds what looks like a key, {where}, and the run folder, the report and the process list would "
                "show it; take it out, and let the program read it from a file"
            )
        return command


AgentConfig = Annotated[
    PlannerAgentConfig | FunctionAgentConfig | CommandAgentConfig,
    Field(discriminator="type"),
    typed("planner", function="function", command="command"),
]
