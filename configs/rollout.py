"""Settings of rollouts: groups, the engine, the planner with its memory, custom agents, and served models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from configs.api_keys import PlainUrl, exposed_key, in_clear_text
from configs.base import Config, Dtype, MayChange, OwnPath, Precision, precision_of, typed
from configs.errors import reason
from configs.plugins import ImportPath

Module = Literal["rule", "model"]
"""A rule without a model, or the frozen base model, never the trained adapter."""


class EngineConfig(Config):
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the engine runs; `cuda` needs a GPU and the `gpu` extra."""
    adapter_mode: Literal["merged", "native"] = Field(
        default_factory=lambda others: "native" if others.get("device") == "cuda" else "merged"
    )
    """`merged`: adapter folded into the weights, the default on a CPU. `native`: versioned adapters, the default on a
    GPU."""
    dtype: Dtype = "auto"
    """Type of the engine's weights and activations; `auto`: bfloat16 on a GPU, the faster type on a CPU."""
    tensor_parallel: MayChange[int] = Field(default=1, ge=1)
    """GPUs of one machine over which each engine spreads every layer, for a model that does not fit on one GPU. More
    than 1 needs `cuda` and `native`, and the engine shares its GPUs with nothing else."""
    max_num_seqs: MayChange[int] = Field(default=64, ge=1)
    """Requests that are decoded together."""
    max_model_len: int = Field(default=1024, ge=64)
    """Tokens of prompt and completion together."""
    kv_cache_gib: MayChange[float] = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Memory for the KV cache; on a CPU it is rounded to whole GiB."""
    num_threads: MayChange[int] = Field(default=2, ge=1)
    """CPU threads of the engine."""
    metrics: MayChange[bool] = False
    """Export vLLM's metrics through Ray to Prometheus, which costs a little time in every engine step."""

    @property
    def precision(self) -> Precision:
        """The type that `dtype` means on this machine."""
        return precision_of(self.dtype, self.device)

    @property
    def adapter_precision(self) -> Precision:
        """The type of published adapters: the engine rounds native ones to its own, and merges others in float32."""
        return self.precision if self.adapter_mode == "native" else "float32"

    @model_validator(mode="after")
    def _spread_engines_are_on_cards(self) -> "EngineConfig":
        if self.tensor_parallel > 1 and (self.device, self.adapter_mode) != ("cuda", "native"):
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} needs device = 'cuda' and adapter_mode = 'native', not "
                f"'{self.device}' and '{self.adapter_mode}': merged weights are replaced in one process only"
            )
        return self


def _read_examples(value: object) -> object:
    """Replace a path by the examples in the file, so that a run keeps them."""
    if not isinstance(value, str):
        return value
    try:
        lines = Path(value).expanduser().read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"'{value}' cannot be read: {reason(error)}") from None
    return [_example(line, f"'{value}', line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _example(line: str, place: str) -> str:
    try:
        row = json.loads(line)
        question, (*steps, last) = row["question"], row["steps"]
        shown = [f"{_decision(step)}\nResult: {step['result']}" for step in steps]
        answers_early = any(step["action"] == "answer" for step in steps)
        if not isinstance(question, str) or answers_early or last["action"] != "answer" or "result" in last:
            raise ValueError
        return "\n".join((f"Task: {question}", *shown, _decision(last)))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(
            f'{place} must be {{"question": ..., "steps": [...]}} whose steps have thought, action, action_input and '
            "result; the last one's action is answer, without a result"
        ) from None


def _decision(step: Mapping[str, object]) -> str:
    names = ("thought", "action", "action_input")
    return json.dumps({name: step[name] for name in names}, ensure_ascii=False, separators=(",", ":"))


class PromptConfig(Config):
    """The beginning of the planner's prompt."""

    instructions: str = "Solve the task step by step with tools. Reply in JSON: thought, action, action_input."
    """First text of the prompt; the tools follow, one per line."""
    examples: Annotated[tuple[str, ...], BeforeValidator(_read_examples)] = ()
    """Solved tasks, which follow the tools: texts, or the path of a JSON Lines file with `question` and `steps`."""


class RolloutConfig(Config):
    group_size: int = Field(default=8, ge=2)
    """Trajectories per task (G)."""
    num_workers: MayChange[int] = Field(default=1, ge=1)
    """Rollout workers, each with an engine; the run starts when all of them are there."""
    max_workers: MayChange[int | None] = Field(default=None, ge=1)
    """Add workers up to this number during the run, wherever the cluster has room; None adds none."""
    max_turn_tokens: int = Field(default=64, ge=8)
    """Tokens of one reply. A longer reply is cut; the planner's counts as a format error then."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature in training; evaluation is greedy."""
    max_tries: MayChange[int] = Field(default=6, ge=1)
    """Tries of a group whose worker dies or that cannot be scored, before the group has failed."""
    episode_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit of one trajectory, without the time that it waits for the engine."""
    wall_timeout_s: float = Field(default=7200.0, gt=0)
    """Time limit of one trajectory with the time that it waits for the engine."""
    max_calls: int = Field(default=64, ge=1)
    """Model calls of one trajectory of a custom agent; a further call is refused."""
    count_failed: bool = True
    """Count an attempt as wrong that goes beyond a limit of its own, such as `episode_timeout_s`, or whose agent fails
    after a reply; false leaves it unscored, as after faults of the engine, of tools and of the machine."""
    engine: EngineConfig = EngineConfig()


class HintsConfig(Config):
    """Right trajectories of training are kept, and their steps are shown as hints for similar tasks."""

    in_evaluation: bool = False
    """Show hints in evaluations and to `solve` too, which otherwise measure the policy alone."""


class LocalMemoryConfig(HintsConfig):
    """No memory, or a separate one in each worker, which ends with it."""

    type: Literal["none", "in_process"] = "none"


class FolderMemoryConfig(HintsConfig):
    """Qdrant in a folder, for a run with one worker."""

    type: Literal["folder"] = "folder"
    path: OwnPath = Field(min_length=1)
    """The folder."""


class ServerMemoryConfig(HintsConfig):
    """A Qdrant server, which all workers share."""

    type: Literal["server"] = "server"
    url: str = Field(pattern=r"^https?://\S+$")
    """Its address, http://host:port."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the server's API key; none sends no key."""

    @model_validator(mode="after")
    def _key_goes_safely(self) -> "ServerMemoryConfig":
        if where := exposed_key(self.url):
            raise ValueError(f"url seems to contain a key, {where}; name its variable with api_key_env instead")
        if in_clear_text(self.url) and self.api_key_env is not None:
            raise ValueError(f"url {self.url} would send the key in clear text: use https")
        return self


MemoryConfig = Annotated[
    LocalMemoryConfig | FolderMemoryConfig | ServerMemoryConfig, Field(discriminator="type"), typed("none")
]


class PlannerAgentConfig(Config):
    """The built-in planner with its tools, verifier and generator."""

    type: Literal["planner"] = "planner"
    prompt: PromptConfig = PromptConfig()
    max_steps: int = Field(default=5, ge=1)
    """Planner steps per task (K); the last one may only answer."""
    format_retries: int = Field(default=1, ge=0)
    """Extra tries per step after a malformed turn, before the step is spent."""
    verifier: Module = "rule"
    """Decides after each step whether the task is done: a rule, or the frozen base model."""
    generator: Module = "rule"
    """Writes the answer if the planner gave none: a rule, or the frozen base model."""
    memory: MemoryConfig = LocalMemoryConfig()
    """What is remembered from one task to the next."""
    lockstep: bool = True
    """At pipeline_depth 0, sample the turns of all trajectories together, which makes a run on a CPU bit-reproducible.
    False samples each turn as soon as it is requested, which is faster with slow tools."""


class CustomAgentConfig(Config):
    """Settings of every custom agent."""

    model: str = Field(default="policy", min_length=1)
    """The policy's name at the endpoint; a call with another name is rejected."""
    sampling: Literal["refuse", "override"] = "refuse"
    """Reject a call whose temperature is not `rollout.temperature`, or that sets top_p, penalties or a logit bias; or
    override these and sample as the recipe says."""


class FunctionAgentConfig(CustomAgentConfig):
    """A custom agent as a function in the rollout worker's process."""

    type: Literal["function"] = "function"
    function: ImportPath
    """`module:name` of `async def name(task, client) -> str`, which returns its answer; `client` is an
    `openai.AsyncOpenAI` for the endpoint. A plain function is called in a thread, with an `openai.OpenAI`."""


class CommandAgentConfig(CustomAgentConfig):
    """A custom agent as a program, started for each attempt."""

    type: Literal["command"] = "command"
    command: str = Field(min_length=1)
    """The program and its arguments; relative files are found in the recipe's folder. It reads the task as JSON from
    its input and prints the answer as its last line."""
    max_memory_mb: int = Field(default=4096, ge=1)
    """Resident memory of all processes of one attempt together, in MiB; an attempt that takes more is ended."""

    @field_validator("command")
    @classmethod
    def _holds_no_key(cls, command: str) -> str:
        if where := exposed_key(command):
            raise ValueError(
                f"it seems to contain a key, {where}, which the run folder, the report and the process list would "
                "show; let the program read the key from a file instead"
            )
        return command


AgentConfig = Annotated[
    PlannerAgentConfig | FunctionAgentConfig | CommandAgentConfig,
    Field(discriminator="type"),
    typed("planner", function="function", command="command"),
]


class VllmConfig(Config):
    """vLLM in this process, with the recipe's own model: what it samples can be trained on."""

    type: Literal["vllm"] = "vllm"


class ServerConfig(Config):
    """A server with OpenAI's chat completions."""

    model: str = Field(min_length=1, max_length=200)
    """The server's name of the model."""
    base_url: PlainUrl
    """Address of the server."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the API key; none sends no key."""

    @model_validator(mode="after")
    def _key_is_safe(self) -> Self:
        if self.api_key_env is not None and in_clear_text(self.base_url):
            raise ValueError(f"base_url {self.base_url} would send the key in clear text: use https")
        return self


class ServedConfig(ServerConfig):
    """Ollama through its native API, or any server with OpenAI's chat completions.

    A server reports no token ids and no log-probs, so its answers can never be trained on.
    """

    type: Literal["ollama", "openai"]
    base_url: PlainUrl = ""
    """Address of the server; by default http://127.0.0.1:11434 for `ollama` and http://127.0.0.1:8000/v1 for `openai`.
    """
    max_concurrency: int = Field(default=4, ge=1, le=256)
    """Trajectories that the server works on at a time."""
    form: Literal["json_schema", "vllm_grammar"] = "json_schema"
    """Constraint of a reply's form, for `openai`: `json_schema` is OpenAI's `response_format`; `vllm_grammar` is the
    planner's own grammar, which only vLLM's server takes."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_address(cls, values: object) -> object:
        if not isinstance(values, Mapping) or "base_url" in values:
            return values
        return {**values, "base_url": DEFAULT_URLS.get(str(values.get("type")), "")}


DEFAULT_URLS = {"ollama": "http://127.0.0.1:11434", "openai": "http://127.0.0.1:8000/v1"}


BackendConfig = Annotated[VllmConfig | ServedConfig, Field(discriminator="type"), typed("vllm")]
