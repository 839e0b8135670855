"""A tiny random model on disk and hand-made samples: the learner's real code on a model of nothing."""

import json

import numpy as np

from configs.learner import DEFAULT_BAND, LearnerConfig, ModelConfig
from learner.types import TrainingSample

WORDS = 60


def save_tiny_model(folder, architecture, **changes):
    """Random weights of the given architecture, two layers, and a word-level tokenizer; `changes` of its sizes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": WORDS + 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True}
    config = AutoConfig.for_model(architecture, bos_token_id=None, eos_token_id=1, **size | heads | changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<eos>": 1, "{": 2, "}": 3} | {f"w{i}": i + 4 for i in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == architecture
    return folder


LOSSES = {name: name for name in ("dapo", "grpo", "flow_grpo", "cispo", "gspo", "dr_grpo")}
LOSSES["flow_grpo"] = {"type": "flow_grpo", "kl_weight": 0.1}


def make_learner(model_path, *, seed=0, guard=False, dtype="float32", base_weights=None, **config):
    """A learner in float32, unless otherwise said, whose adapter is not zero."""
    import torch

    from learner.learner import Learner

    learner = Learner(
        model_path,
        ModelConfig(lora_rank=4),
        LearnerConfig(num_threads=1, guard=guard, dtype=dtype, **config),
        seed=seed,
        base_weights=base_weights,
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in learner.policy.trainable_parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return learner


def sample(token_ids, trained, *, advantage=1.0, age=0, name="t", temperature=1.0):
    """A sample whose positions in `trained` carry the loss."""
    mask = np.zeros(len(token_ids), dtype=bool)
    mask[list(trained)] = True
    return TrainingSample(
        trajectory_id=name,
        ages=np.where(mask, age, -1),
        token_ids=np.array(token_ids, dtype=np.int64),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1.0), np.float32(0)),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        turn_ids=np.where(mask, 0, -1),
        grammar_spans=(),
        temperature=temperature,
    )


def make_samples():
    """Three siblings with a common prompt, and a trajectory of its own."""
    prompt = [5, 6, 7, 8]
    return [
        sample([*prompt, 10, 11, 1, 9, 12, 1], [4, 5, 6, 8, 9], advantage=1.0, name="a"),
        sample([*prompt, 10, 13, 1], [4, 5, 6], advantage=-0.5, name="b"),
        sample([*prompt, 14, 1], [4, 5], advantage=-0.7, name="c"),
        sample([20, 21, 22, 23, 24, 25, 26, 1], [5, 6, 7], advantage=0.9, name="d", temperature=0.7),
    ]


def loss_inputs(learner, rollout, advantages, mask, **further):
    """Of old tokens in one turn without a correction, unless otherwise said."""
    from learner.losses import LossInputs

    ones = mask.long().clamp(min=1)
    sizes = {"num_loss_tokens": 5, "num_trajectories": len(mask), "row_weights": ones[:, :1]}
    correction = {"correction": "none", "correction_band": DEFAULT_BAND}
    return LossInputs(
        learner_logprobs=learner,
        rollout_logprobs=rollout,
        advantages=advantages,
        loss_mask=mask,
        **sizes | correction | {"ages": ones, "turn_ids": 0 * ones} | further,
    )


def gradient_of(learner, batch):
    """The flattened gradient of the adapter."""
    import torch

    learner._accumulate(batch.microbatches, lambda rows: learner._rl_loss(rows, batch))
    gradient = torch.cat([parameter.grad.flatten() for parameter in learner.policy.trainable_parameters()])
    learner.optimizer.zero_grad()
    return gradient


def random_tree(num_nodes, *, seed=0, leaving=0.02):
    """A row in preorder: each node hangs on the one before it, or with a probability on an ancestor of that one."""
    from learner.packing import PackedRow

    rng, path, parents = np.random.default_rng(seed), [], []
    for node in range(num_nodes):
        if rng.random() < leaving:
            path = path[: int(rng.integers(0, len(path) + 1))]
        parents.append(path[-1] if path else -1)
        path.append(node)
    nothing = np.zeros(num_nodes, dtype=np.int64)
    return PackedRow(token_ids=nothing, positions=nothing, parents=np.array(parents), node_of=())


def reads(ends):
    """`[N, N]` bool: row q is True at the nodes that q reads."""
    nodes = np.arange(len(ends))
    return (nodes[None, :] <= nodes[:, None]) & (nodes[:, None] < ends[None, :])
