"""`agentflow plan`: the arithmetic against hand computation and against the allocations of real models."""

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from configs.errors import UserError
from configs.loading import RECIPES, load_run_config
from learner import tree_attention
from ray_jobs import cli
from ray_jobs.plan import GIB, activations, advice, engine_working, find_card, kv_token_bytes, make_plan
from ray_jobs.run.model_folder import find_shape, known_models, shape_of
from ray_jobs.run.pace import pace

A40_RECIPE = RECIPES / "dapo_qwen3_8b_a40.toml"
TWO_COPIES = ("card.share_base=false", "rollout.engine.kv_cache_gib=3", "rollout.engine.max_num_seqs=32")
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "kib_per_token", "lora"),
    [
        ("Qwen/Qwen3-8B", 144, 36 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))),
        ("Qwen/Qwen2.5-7B-Instruct", 56, 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))),
        ("meta-llama/Llama-3.1-8B-Instruct", 128, 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))),
    ],
)
def test_cache_and_adapter_by_hand(name, kib_per_token, lora):
    """KiB a token, and the parameters of a rank-32 adapter of all linear layers, by rank."""
    shape = find_shape(name)
    assert kv_token_bytes(shape, "bfloat16") == kib_per_token * 1024
    assert shape.lora_parameters(32, ALL_LINEARS) == 32 * lora


def test_shapes_of_known_models_have_the_parameters_that_their_pages_state():
    for name, facts in known_models().items():
        assert find_shape(name).num_parameters == facts["parameters"], name


def test_other_models_of_the_hub_are_read_there(tmp_path):
    config = known_models()["Qwen/Qwen3-8B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with patch("huggingface_hub.snapshot_download", return_value=str(tmp_path)):
        assert find_shape("acme/chat") == shape_of(config, name="acme/chat")
    with (
        patch("huggingface_hub.snapshot_download", side_effect=OSError("no network")),
        pytest.raises(UserError, match=r"prm\.model_path"),
    ):
        find_shape("acme/chat", key="prm.model_path")


def test_a40_recipe_by_hand():
    """With two copies of the base weights; every figure in GiB, to two places."""
    plan = plan_of_two_copies()
    engine, learner, prm = plan.cards[0].processes
    assert [round(part / GIB, 2) for part in engine.parts.values()] == [
        round(8_190_735_360 * 2 / GIB, 2),
        round(4 * 87_293_952 * 2 / GIB, 2),
        3.0,
        # A step's MLP, 32 sampled rows of logits, and two chunks of 1,024 scored rows.
        round((2048 * ((2 * 4096 + 3 * 12288) * 2 + 3 * 32 * 4) + (32 * 14 + 2 * 1024 * 2) * 151_936) / GIB, 2),
        1.0,
        0.45,
    ]
    layer_again = 10 * 4096 + 6 * (4096 + 1024) + 12 * 12288 + 16 * 32
    acting = 36 * 6144 * 4096 * 2 + 6144 * layer_again
    assert [round(part / GIB, 2) for part in learner.parts.values()] == [
        round(8_190_735_360 * 2 / GIB, 2),
        round(87_293_952 * 16 / GIB, 2),
        round(acting / GIB, 2),
        round(0.05 * acting / GIB, 2),
        0.45,
    ]
    assert prm.parts["weights"] == 596_049_920 * 2
    assert plan.refusals == ()
    assert plan.cards[0].free == find_card("A40")[1] - sum(one.num_bytes for one in (engine, learner, prm))


def test_logits_of_a_step_that_scores_a_prompt():
    """The sampled rows, and those of all tokens of a step that also scores a prompt, in bfloat16."""
    logits = 32 * 151_936 * (2 + 12) + 512 * 151_936 * 2
    working = engine_working(find_shape("Qwen/Qwen3-8B"), "bfloat16", 512, 32, 32)
    assert working == 512 * ((2 * 4096 + 3 * 12288) * 2 + 3 * 32 * 4) + logits


def plan_of_two_copies(*overrides, card="A40"):
    """Plan the recipe for one card with separate base weights for engine and learner."""
    return make_plan(load_run_config(A40_RECIPE, (*TWO_COPIES, *overrides)), card=card)


@pytest.mark.parametrize(
    ("overrides", "card", "setting"),
    [
        (("rollout.engine.kv_cache_gib=6",), "A40", "rollout.engine.kv_cache_gib"),
        (("learner.microbatch_tokens=16384",), "A40", "learner.microbatch_tokens"),
        (("rollout.engine.kv_cache_gib=0.5",), "A40", "rollout.engine.max_model_len"),
        (
            ("model.path=Qwen/Qwen2.5-7B-Instruct", "rollout.engine.max_model_len=40000"),
            "H200",
            "rollout.engine.max_model_len",
        ),
        (("card.shared=false",), "A40", "card.learner"),
        ((), "24", "larger card"),
    ],
)
def test_run_that_does_not_fit_names_the_setting(overrides, card, setting):
    assert setting in plan_of_two_copies(*overrides, card=card).refusals[0]


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("4090", "RTX 4090", 23.6),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 23.6),
        ("a100-40", "A100-40", 39.4),
        ("24", "a card of 24 GiB", 24),
        ("24.5 GB", "a card of 24.5 GiB", 24.5),
    ],
)
def test_card_is_a_product_or_its_memory(text, name, gib):
    assert find_card(text) == (name, int(gib * GIB))


@pytest.mark.parametrize("text", ["3080", "0", "-4", "nan", "", "1e3", "GB"])
def test_unknown_card_is_refused(text):
    with pytest.raises(UserError, match="--card"):
        find_card(text)


@pytest.mark.parametrize("card", ["4090", "32", "A40", "A6000", "H100"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B"])
@pytest.mark.parametrize("checkpointing", ["true", "false"])
def test_advice_works_when_followed(model, card, checkpointing):
    settings = [
        f"model.path={model}",
        "learner.microbatch_tokens=8192",
        f"learner.gradient_checkpointing={checkpointing}",
    ]
    config = load_run_config(A40_RECIPE, settings)
    changes = advice(config, card=card)
    followed = [f"{key}={str(value).lower()}" for key, value in changes.items()]
    plan = make_plan(load_run_config(A40_RECIPE, [*settings, *followed]), card=card)
    assert not plan.refusals or (model == "Qwen/Qwen3-8B" and card in ("4090", "32") and not changes)
    if not plan.refusals and plan.kv_sequences < config.rollout.engine.max_num_seqs:
        assert plan.cards[0].free < 1.6 * GIB


def test_shared_base_weights_on_an_a40():
    """17.5 GiB / (144 KiB x 16) = 7964.4 blocks of 16 tokens, so 7964 of them, which are 20 sequences of 6144."""
    plan = make_plan(load_run_config(A40_RECIPE, ["rollout.num_workers=2"]), card="A40")
    assert (plan.kv_tokens, plan.kv_sequences) == (7964 * 16, 20)
    weights = {process.name: process.parts.get("weights") for process in plan.cards[0].processes}
    assert weights == {"base weights": 2 * 8_190_735_360, "engine": None, "learner": None, "PRM": 2 * 596_049_920}
    # The further engine, on another card, has its own copy.
    (engine,) = plan.cards[1].processes
    assert engine.parts["weights"] == 2 * 8_190_735_360


@pytest.mark.parametrize(
    ("model", "fitting"), [("Qwen/Qwen2.5-7B-Instruct", [1, 2, 4]), ("Qwen/Qwen3-8B", [1, 2, 4, 8, 16])]
)
def test_engine_is_spread_only_over_cards_that_divide_heads_and_mlp(model, fitting):
    """28 heads of queries, 4 of keys, 18,944 = 2^9 x 37 in the MLP; and 32, 8, 12,288 = 2^12 x 3."""
    for cards in range(1, 17):
        with nullcontext() if cards in fitting else pytest.raises(UserError, match=r"rollout\.engine\.tensor_parallel"):
            find_shape(model).check_cards(cards)


def test_learner_ranks_divide_the_moments_and_load_all_base_weights():
    two = plan_of_two_copies("learner.num_workers=2").cards[1].processes[0].parts
    assert two["weights"] == 2 * 8_190_735_360
    assert two["adapter, gradient, AdamW"] == 87_293_952 * (4 + 4 + 4)
    assert two["gradient bucket"] == 87_293_952 * 4


def estimate(card, *overrides):
    config = load_run_config(A40_RECIPE, overrides)
    plan = make_plan(config, card="H200")
    return pace(config, plan.policy, kv_token_bytes=plan.kv_token_bytes, kv_tokens=plan.kv_tokens, card=card)


def test_speeds_of_an_h100_are_those_that_were_measured():
    """`benchmarks/measured/h100.jsonl`: 32 sequences of 1,630 tokens; with and without recomputed layers."""
    found = estimate("H100", "rollout.engine.max_num_seqs=32", f"rollout.engine.max_model_len={3 * 1630}")
    assert found.sampled_per_s == pytest.approx(32 / 0.011559, rel=0.05)
    assert found.packed_per_s == pytest.approx((4885 + 4395) / 2, rel=0.05)
    found = estimate("H100", "learner.gradient_checkpointing=false")
    assert found.packed_per_s == pytest.approx(7260, rel=0.05)


def test_time_of_a_step_by_hand():
    """Of 48 attempts of 2,048 tokens, from twice as many; engine and learner do 1.15 times the work of one."""
    found = estimate("A40")
    sampling_s = 96 * 1024 * (1 / found.sampled_per_s + 2 * 8_190_735_360 / (0.4 * 150e12))
    assert found.step_s == pytest.approx((sampling_s + 48 * 2048 / found.packed_per_s) / 1.15)
    apart = estimate("A40", "card.shared=false", "card.share_base=false", "rollout.num_workers=2")
    assert apart.step_s == pytest.approx(max(sampling_s / 2, 48 * 2048 / found.packed_per_s))


def test_speeds_are_estimated_only_for_known_cards():
    assert estimate("a card of 48 GiB") is None
    assert estimate("A40", "learner.device=cpu", "card.shared=false", "card.share_base=false") is None


def test_plan_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["plan", str(A40_RECIPE)]) == 0
    assert "144 KiB per token" in capsys.readouterr().out
    assert cli.main(["plan", str(A40_RECIPE), "rollout.engine.kv_cache_gib=20"]) == 1
    assert "rollout.engine.kv_cache_gib" in capsys.readouterr().out
    for card in ("potato", "A100"):
        assert cli.main(["plan", "demo_cpu", "--card", card]) == 2
        assert "--card" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[]")
    assert cli.main(["plan", str(A40_RECIPE), f"model.path={tmp_path}"]) == 2


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}


FAMILIES = {
    "qwen3": {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 512},
    "qwen2": {"hidden_size": 224, "intermediate_size": 1184, "vocab_size": 4096},
    "llama": {"hidden_size": 192, "intermediate_size": 512, "vocab_size": 8192},
}


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_match_real_allocations(monkeypatch, family, checkpointing):
    """Every tensor of the real learner in a card's precision and with its attention is counted."""
    monkeypatch.setattr(tree_attention, "_attend_on_cpu", tree_attention._attend_on_card)
    sizes = SIZES | FAMILIES[family]
    peak = allocated(family, sizes, num_tokens=400, checkpointing=checkpointing)
    shape = shape_of({"model_type": family, "max_position_embeddings": 4096} | sizes, name="small")
    planned = activations(shape, 400, rank=8, checkpointing=checkpointing, chunk=64)
    assert planned == pytest.approx(peak, rel=0.1)


def allocated(family, sizes, *, num_tokens, checkpointing):
    import numpy as np
    from live_memory import LiveMemory
    from tiny import sample, save_tiny_model

    from configs.learner import LearnerConfig, ModelConfig
    from learner.learner import Learner
    from learner.packing import build_batch

    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(
            save_tiny_model(Path(folder), family, **sizes),
            ModelConfig(lora_rank=8),
            LearnerConfig(num_threads=1, dtype="bfloat16", gradient_checkpointing=checkpointing),
            seed=0,
        )
    ids = np.random.default_rng(0).integers(4, 60, num_tokens).tolist()
    # All tokens are trained, as the plan assumes.
    batch = build_batch([sample(ids, range(1, num_tokens))], microbatch_tokens=10_000)
    with patch("learner.policy.LOGIT_CHUNK_TOKENS", 64):
        learner.train_step(batch)
        with LiveMemory() as memory:
            learner.train_step(batch)
    return memory.peak
