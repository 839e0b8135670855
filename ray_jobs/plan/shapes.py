"""The shape of a model, from its config.json: how many weights it has and where, without loading one."""

import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.errors import UserError, did_you_mean, reason
from learner.demo_model import demo_model_dir

KNOWN = Path(__file__).with_name("models.toml")
DEMO = "HuggingFaceTB/SmolLM2-135M-Instruct"
FAMILIES = ("llama", "qwen2", "qwen3")
MOST_CARDS = 16
"""Of one machine."""


class PlanError(UserError):
    """No plan can be made; the message says what of, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder of the Llama or Qwen family. `head_dim` may differ from hidden / heads; queries are
    `heads * head_dim` wide, keys and values `kv_heads * head_dim`."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of every linear layer of a block."""
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
    def layer_parameters(self) -> int:
        """Linear layers, their biases where the family has them, two norms, and the norms of queries and keys."""
        weights = sum(inputs * outputs for inputs, outputs in self.linears.values())
        biases = self.qkv_bias * (self.query + 2 * self.key) + self.o_bias * self.hidden
        biases += self.mlp_bias * (2 * self.intermediate + self.hidden)
        return weights + biases + 2 * self.hidden + self.qk_norm * 2 * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Blocks, last norm, and the embedding: once where the output head is tied to it, else twice."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.layer_parameters + self.hidden

    def lora_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """A is `[rank, inputs]` and B `[outputs, rank]` for every targeted linear layer of every block. Raises
        PlanError for a layer that the model lacks."""
        if missing := [name for name in targets if name not in self.linears]:
            raise PlanError(
                f"model.lora_targets names '{missing[0]}', which {self.name} lacks; it has {', '.join(self.linears)}"
            )
        return rank * self.num_layers * sum(sum(self.linears[name]) for name in targets)

    def divides_over(self, cards: int) -> bool:
        """Whether so many cards can hold an equal part of every layer each: of the heads, and of the MLP. With more
        cards than heads of keys each of these is on several."""
        keys = self.kv_heads % cards == 0 or cards % self.kv_heads == 0
        return keys and self.heads % cards == 0 and self.intermediate % cards == 0

    def check_cards(self, cards: int) -> None:
        """Raises PlanError where an engine cannot be spread over so many."""
        if self.divides_over(cards):
            return
        fitting = " or ".join(str(count) for count in range(2, MOST_CARDS + 1) if self.divides_over(count))
        raise PlanError(
            f"rollout.engine.tensor_parallel = {cards} does not divide {self.name}, which has {self.heads} heads of "
            f"queries, {self.kv_heads} of keys and {self.intermediate:,} values in its MLP; use {fitting or 1} cards"
        )

    def cut(self, num_layers: int | None) -> "ModelShape":
        """The first so many layers; None keeps all."""
        return self if num_layers is None else replace(self, num_layers=min(num_layers, self.num_layers))


def find_shape(path: str, config_file: Path | None = None) -> ModelShape:
    """The shape of a model by what a recipe calls it: from `config_file`, from a local folder, or from the models known
    here. Raises PlanError; asks no model hub."""
    if config_file is not None:
        return read_shape(_read_json(config_file), name=str(config_file))
    folder = demo_model_dir() if path == "demo" else Path(path).expanduser()
    if (folder / "config.json").is_file():
        return read_shape(_read_json(folder / "config.json"), name=path)
    known = known_models()
    name = _known_name(DEMO if path == "demo" else path, known)
    if name is None:
        raise PlanError(
            f"'{path}' is neither a model folder nor one of the known models ({', '.join(known)}); download its "
            f"config.json and give it with --model-config FILE{did_you_mean(path, known)}"
        )
    return read_shape(known[name]["config"], name=path)


def _known_name(path: str, known: Iterable[str]) -> str | None:
    """A model's instruction-tuned version has the shape of its base, but for the longest context, and a copy of it the
    same."""

    def plain(name: str) -> str:
        return name.rpartition("/")[2].lower().removesuffix("-instruct").removesuffix("-base")

    return next((name for name in known if plain(name) == plain(path)), None)


def known_models() -> dict[str, dict[str, Any]]:
    return tomllib.loads(KNOWN.read_text())


def read_shape(config: dict[str, Any], *, name: str) -> ModelShape:
    """Raises PlanError for what these formulas do not cover."""
    family = str(config.get("model_type", "none"))
    if any("expert" in key for key in config) or "moe" in family:
        raise PlanError(f"{name} is a mixture of experts; plan, engine and learner here are for dense models")
    if "quantization_config" in config:
        raise PlanError(f"{name} is quantised; the learner trains on bfloat16 or float32 weights: name that model")
    if family not in FAMILIES:
        raise PlanError(f"{name} has model_type '{family}'; known are {', '.join(FAMILIES)}")
    if config.get("use_sliding_window"):
        raise PlanError(f"{name} reads a sliding window, and the learner reads all that was said before")
    try:
        heads = int(config["num_attention_heads"])
        bias = bool(config.get("attention_bias", False))
        return ModelShape(
            name=name,
            num_layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family != "qwen2",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            max_positions=int(config["max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"config.json of {name} is incomplete or broken: {error!r}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as a model's config.json: {reason(error)}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path} is no config.json of a model: it holds no object")
    return config
