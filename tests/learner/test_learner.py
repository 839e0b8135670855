from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import sample, save_tiny_model

from configs.learner import LearnerConfig
from configs.model import ModelConfig
from learner.batching import build_batch
from learner.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from learner.learner import Learner
from learner.types import Adapter


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model_path(request, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def make_learner(model_path, *, off_policy=False, seed=0, **config):
    learner = Learner(
        model_path,
        ModelConfig(lora_rank=4),
        LearnerConfig(num_threads=1, **config),
        off_policy=off_policy,
        seed=seed,
        mixed_precision=False,
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in learner.policy.trainable_parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return learner


def make_samples():
    prompt = [5, 6, 7, 8]
    return [
        sample([*prompt, 10, 11, 1, 9, 12, 1], [4, 5, 6, 8, 9], advantage=1.0, name="a"),
        sample([*prompt, 10, 13, 1], [4, 5, 6], advantage=-0.5, name="b"),
        sample([*prompt, 14, 1], [4, 5], advantage=-0.7, name="c"),
        sample([20, 21, 22, 23, 24, 25, 26, 1], [5, 6, 7], advantage=0.9, name="d", temperature=0.7),
    ]


def gradient_of(learner, batch):
    learner._accumulate(batch.microbatches, lambda rows: learner._rl_loss(rows, batch))
    gradient = torch.cat([parameter.grad.flatten() for parameter in learner.policy.trainable_parameters()])
    learner.optimizer.zero_grad()
    return gradient


def test_packed_logprobs_are_those_of_the_plain_model(model_path):
    learner = make_learner(model_path)
    samples = make_samples()
    packed = learner.policy.logprobs(samples)
    for row, one in zip(packed, samples, strict=True):
        ids = torch.from_numpy(one.token_ids)[None]
        plain = (
            learner.policy.model(input_ids=ids, tree_blocks=plain_blocks(len(one.token_ids))).logits[0].float()
            / one.temperature
        )
        expected = plain.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        trained = np.nonzero(one.loss_mask)[0]
        assert torch.allclose(row[trained], expected[trained - 1], atol=1e-5)
        assert row[~np.pad(one.loss_mask, (0, len(row) - len(one.loss_mask)))].abs().sum() == 0


def plain_blocks(length):
    from learner.tree_attention import plan_attention

    return plan_attention(np.tril(np.ones((length, length), dtype=bool)), torch.device("cpu"))


def test_attention_in_blocks_is_attention_with_a_causal_mask():
    from learner.tree_attention import tree_attention

    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 300, 8), torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    found, _ = tree_attention(torch.nn.Module(), query, key, value, None, tree_blocks=plain_blocks(300))
    repeated = [tensor.repeat_interleave(2, 1) for tensor in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, is_causal=True)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("objective", ["dapo", "grpo", "flow_grpo"])
def test_any_split_into_microbatches_gives_the_same_gradient(model_path, objective):
    learner = make_learner(model_path, objective=objective, kl_weight=0.1)
    samples = make_samples()
    whole = gradient_of(learner, build_batch(samples, microbatch_tokens=1000))
    for microbatch_tokens in (8, 12, 20):
        split = gradient_of(learner, build_batch(samples, microbatch_tokens=microbatch_tokens))
        assert (whole - split).abs().max() < 1e-6


def test_order_of_the_samples_does_not_matter(model_path):
    learner = make_learner(model_path)
    there = gradient_of(learner, build_batch(make_samples(), microbatch_tokens=1000))
    back = gradient_of(learner, build_batch(make_samples()[::-1], microbatch_tokens=1000))
    assert (there - back).abs().max() < 1e-6


def test_gradient_is_the_one_of_a_plain_padded_batch(model_path):
    learner = make_learner(model_path)
    samples = [one for one in make_samples() if one.temperature == 1.0]
    found = gradient_of(learner, build_batch(samples, microbatch_tokens=1000))
    total = sum(one.num_loss_tokens for one in samples)
    for one in samples:
        ids = torch.from_numpy(one.token_ids)[None]
        logits = learner.policy.model(input_ids=ids, tree_blocks=plain_blocks(ids.shape[1])).logits
        logprobs = logits[0].float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.from_numpy(one.loss_mask)[1:]
        ratio = (logprobs - torch.from_numpy(one.rollout_logprobs)[1:]).exp()
        advantage = torch.from_numpy(one.advantages)[1:]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        (loss[mask].sum() / total).backward()
    plain = torch.cat([parameter.grad.flatten() for parameter in learner.policy.trainable_parameters()])
    assert (found - plain).abs().max() < 1e-6


def test_one_step_makes_the_rewarded_tokens_likelier_and_a_new_version(model_path):
    learner = make_learner(model_path, off_policy=True, learning_rate=1e-2)
    samples = make_samples()
    before = learner.policy.logprobs(samples).detach()
    result = learner.train_step(build_batch(samples, microbatch_tokens=1000))
    after = learner.policy.logprobs(samples).detach()
    advantages = torch.zeros_like(before)
    for row, one in zip(advantages, samples, strict=True):
        row[: len(one.advantages)] = torch.from_numpy(one.advantages)
    assert ((after - before) * advantages).sum() > 0
    assert (result.policy_version, learner.policy_version) == (1, 1)
    assert result.metrics["policy/grad_norm"] > 0


def test_batch_without_loss_tokens_changes_no_weight(model_path):
    learner = make_learner(model_path)
    before = learner.adapter().digest
    learner.train_step(build_batch([sample([5, 6, 7], [], name="x")], microbatch_tokens=100))
    assert learner.adapter().digest == before


def test_adapter_bytes_carry_their_digest_and_broken_ones_are_refused(model_path):
    learner = make_learner(model_path)
    adapter = learner.adapter()
    other = make_learner(model_path, seed=1)
    assert other.adapter().digest != adapter.digest
    other.load_adapter(adapter)
    assert other.adapter().digest == adapter.digest
    broken = Adapter(policy_version=1, data=adapter.data[:-1] + b"x", digest=adapter.digest)
    with pytest.raises(ValueError, match="digest"):
        other.load_adapter(broken)


def test_with_the_adapter_off_the_policy_is_the_base_model(model_path):
    samples = make_samples()
    learner, other = make_learner(model_path), make_learner(model_path, seed=1)
    with learner.policy.model.disable_adapter(), other.policy.model.disable_adapter():
        assert torch.equal(learner.policy.logprobs(samples), other.policy.logprobs(samples))


def test_flow_grpo_pulls_the_policy_back_to_the_untouched_model(model_path):
    learner = make_learner(model_path, objective="flow_grpo", kl_weight=1.0, learning_rate=1e-2)
    still = [replace(one, advantages=np.zeros_like(one.advantages)) for one in make_samples()]
    batch = build_batch(still, microbatch_tokens=1000)
    divergence = [learner.train_step(batch).metrics["policy/kl_ref_k3"] for _ in range(8)]
    assert 0 < divergence[-1] < divergence[0] / 2


def test_untrained_adapter_has_no_divergence_from_its_reference(model_path):
    learner = Learner(
        model_path,
        ModelConfig(lora_rank=4),
        LearnerConfig(num_threads=1, objective="flow_grpo"),
        off_policy=True,
        seed=0,
        mixed_precision=False,
    )
    result = learner.train_step(build_batch(make_samples(), microbatch_tokens=1000))
    assert result.metrics["policy/kl_ref_k3"] == 0


def test_checkpoint_restores_weights_optimizer_and_version(model_path, tmp_path):
    learner = make_learner(model_path)
    batch = build_batch(make_samples(), microbatch_tokens=1000)
    learner.train_step(batch)
    folder = save_checkpoint(learner, tmp_path, keep=2)
    restored = make_learner(model_path, seed=1)
    load_checkpoint(restored, folder)
    for one in (learner, restored):
        one.train_step(batch)
    assert learner.adapter().digest == restored.adapter().digest
    assert restored.policy_version == 2


def test_only_the_newest_checkpoints_are_kept(model_path, tmp_path):
    learner = make_learner(model_path)
    for version in range(4):
        learner.policy_version = version
        save_checkpoint(learner, tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v000002", "v000003"]


def test_changed_or_half_written_checkpoint_is_named_and_refused(model_path, tmp_path):
    learner = make_learner(model_path)
    folder = save_checkpoint(learner, tmp_path, keep=2)
    (folder / "optimizer.pt").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: sha256"):
        load_checkpoint(learner, folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_checkpoint(learner, folder)


def test_full_disk_is_one_clear_error_and_leaves_nothing_behind(model_path, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        save_checkpoint(make_learner(model_path), tmp_path / "file", keep=1)
