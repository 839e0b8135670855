"""The process reward model (PRM), which maps a step's text to a score in [0, 1]."""

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from configs.base import fastest_precision
from configs.errors import UserError
from configs.learner import ModelConfig
from configs.reward import PrmConfig
from configs.run import RunConfig
from learner.backbone import Backbone
from learner.checkpoint import read_manifest, write_manifest
from learner.packing import NumberedSequence, TokenSequence, pack, split_microbatches
from reward.judging import PrmError
from reward.prm.step_text import RENDERER_VERSION, StepText, encode_step
from rollout.files import whole_folder

WEIGHTS = "prm.safetensors"
LORA_ALPHA = 32.0
"""Numerator of the adapter's scale; the delta of a weight is alpha / rank * B A."""


class ProcessRewardModel:
    """A transformer with a LoRA adapter and a linear head in float32 at the last token of the decision.

    Sequence regression: score = sigmoid(head(h_last)). Steps of one group share prefixes and are computed as one tree.
    """

    def __init__(self, model_path: Path, config: PrmConfig, *, seed: int) -> None:
        torch.set_num_threads(config.num_threads)
        self.config = config
        self.backbone = Backbone(
            model_path,
            ModelConfig(lora_rank=config.lora_rank, lora_alpha=LORA_ALPHA),
            device=config.device,
            seed=seed,
            mixed_precision=fastest_precision(config.device) == "bfloat16",
            num_layers=config.num_layers,
            gradient_checkpointing=config.gradient_checkpointing,
        )
        self.head = torch.nn.Linear(self.backbone.hidden_size, 1).to(self.backbone.device)
        for parameter in self.head.parameters():
            torch.nn.init.zeros_(parameter)
        self.digest = ""

    def rows(self, steps: Sequence[StepText]) -> list[NumberedSequence]:
        """Encode the steps; those whose decision does not fit `max_tokens` are left out."""
        rows = []
        # Special tokens in text of models and tools stay text.
        tokenize = partial(self.backbone.tokenizer, add_special_tokens=False, split_special_tokens=True)
        for index, step in enumerate(steps):
            token_ids = encode_step(step, lambda text: tokenize(text).input_ids, max_tokens=self.config.max_tokens)
            if token_ids is not None:
                rows.append(NumberedSequence(index, np.array(token_ids, dtype=np.int64)))
        return rows

    def predict(self, rows: Sequence[TokenSequence]) -> Tensor:
        """Return scores `[B]` in float32, in the order of `rows`, from one differentiable forward pass."""
        packed = pack(rows)
        # Equal steps share their last node. It is read once, because the order in which threads add the gradients of
        # repeated reads is not deterministic.
        nodes, row_of = np.unique([path[-1] for path in packed.node_of], return_inverse=True)
        hidden = self.backbone.hidden_states(packed)[self.backbone.tensor(nodes)].float()
        return torch.sigmoid(self.head(hidden).squeeze(-1))[self.backbone.tensor(row_of)]

    def score(self, steps: Sequence[StepText]) -> list[float | None]:
        """Return scores in [0, 1]; None for a decision that is longer than the PRM reads.

        Raises PrmError if a score is not finite, because a broken model must not look like a bad step.
        """
        scores: list[float | None] = [None] * len(steps)
        with torch.no_grad():
            for batch in split_microbatches(self.rows(steps), self.config.microbatch_tokens):
                for row, score in zip(batch, self.predict(batch).tolist(), strict=True):
                    if not math.isfinite(score):
                        raise PrmError(f"PRM {self.digest[:12]} gave the score {score}; its weights are broken")
                    scores[row.index] = score
        return scores

    def trainable_parameters(self) -> list[dict[str, object]]:
        """Return two parameter groups: the adapter, and the head at ten times its learning rate."""
        rate = self.config.learning_rate
        return [
            {"params": self.backbone.trainable_parameters(), "lr": rate},
            {"params": list(self.head.parameters()), "lr": 10 * rate},
        ]

    def save(self, folder: Path, **facts: object) -> None:
        """Write adapter, head and a manifest with `facts` atomically, and set `digest`."""
        head = {f"head.{name}": value.detach().contiguous().cpu() for name, value in self.head.state_dict().items()}
        data = safetensors.torch.save(self.backbone.adapter_state() | head)
        self.digest = hashlib.sha256(data).hexdigest()
        with whole_folder(folder) as unfinished:
            (unfinished / WEIGHTS).write_bytes(data)
            (unfinished / "prm.json").write_text(self.config.model_dump_json(indent=2) + "\n")
            write_manifest(unfinished, kind="prm", renderer=RENDERER_VERSION, **facts)

    def load(self, folder: Path) -> None:
        """Load the weights of `folder`. Raise UserError if they are incomplete or of another renderer."""
        manifest = read_prm_manifest(folder)
        state = safetensors.torch.load((folder / WEIGHTS).read_bytes())
        head = {name.removeprefix("head."): state.pop(name) for name in list(state) if name.startswith("head.")}
        self.backbone.load_adapter_state(state)
        self.head.load_state_dict(head)
        self.digest = str(manifest["files"][WEIGHTS])


def read_prm_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a complete PRM of this renderer. Raise UserError for any other folder."""
    manifest = read_manifest(folder)
    if manifest.get("kind") != "prm":
        raise UserError(f"{folder} is not a PRM folder; name one that `agentflow train-prm` wrote")
    if manifest["renderer"] != RENDERER_VERSION:
        raise UserError(
            f"{folder} was trained on step texts of renderer {manifest['renderer'][:12]}, this version renders "
            f"{RENDERER_VERSION[:12]}; train the PRM again"
        )
    return manifest


def prm_settings(folder: Path, here: PrmConfig) -> PrmConfig:
    """Return the settings that a saved PRM was trained with, with device, threads and microbatch size of `here`."""
    read_prm_manifest(folder)
    trained = PrmConfig.model_validate_json((folder / "prm.json").read_text())
    return trained.model_copy(update=here.model_dump(include={"device", "num_threads", "microbatch_tokens"}))


def prm_in_use(config: RunConfig) -> PrmConfig:
    """Return the settings of the trained PRM that the recipe names, or of the one that the run trains."""
    trained = config.reward.prm_path
    return prm_settings(Path(trained), config.prm) if trained else config.prm
