import json

import numpy as np
import pytest
import torch
from tiny import LOSSES, gradient_of, make_learner, make_samples, sample, save_tiny_model

from configs.errors import UserError
from learner.checkpoint import load_checkpoint, save_checkpoint
from learner.packing import build_batch
from learner.tree_attention import plan_attention
from learner.types import GrammarSpan
from tests.changed import replace


def plain_blocks(length):
    return plan_attention(np.full(length, length), torch.device("cpu"))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model_path(request, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


def test_packed_logprobs_are_those_of_the_plain_model(model_path):
    learner = make_learner(model_path)
    samples = make_samples()
    packed = learner.policy.logprobs(samples)
    for row, one in zip(packed, samples, strict=True):
        ids = torch.from_numpy(one.token_ids)[None]
        logits = learner.policy.model(input_ids=ids, tree_blocks=plain_blocks(len(one.token_ids))).logits[0]
        plain = logits.float() / one.temperature
        expected = plain.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        trained = np.nonzero(one.loss_mask)[0]
        assert torch.allclose(row[trained], expected[trained - 1], atol=1e-5)
        assert row[~np.pad(one.loss_mask, (0, len(row) - len(one.loss_mask)))].abs().sum() == 0


GRAMMAR = 'root ::= "{" ("w1" | "w2") "}"'


def grammar_turn(word=5, **sampled):
    """Two prompt tokens and a turn under a grammar that leaves one, two, then one token of 64."""
    span = GrammarSpan(start=2, end=5, grammar=GRAMMAR)
    return replace(sample([6, 7, 2, word, 3], [2, 3, 4], **sampled), grammar_spans=(span,))


@pytest.mark.parametrize("objective", LOSSES)
def test_any_split_into_microbatches_gives_the_same_gradient(model_path, objective):
    """Down to one sample each, so that siblings do not share the computation of their prefix."""
    learner = make_learner(model_path, loss=LOSSES[objective])
    samples = [*make_samples(), grammar_turn(name="e"), grammar_turn(6, name="f", advantage=-1.0)]
    whole, *split, apart = (build_batch(samples, microbatch_tokens=size) for size in (1000, 20, 12, 6))
    assert (len(whole.microbatches), len(apart.microbatches)) == (1, len(samples))
    expected = gradient_of(learner, whole)
    for batch in (*split, apart):
        assert (expected - gradient_of(learner, batch)).abs().max() < 1e-6


@pytest.mark.parametrize("objective", ["grpo", "flow_grpo", "gspo", "dr_grpo"])
def test_a_trajectory_that_branches_weighs_no_more_than_another(model_path, objective):
    """A policy that samples one trajectory's row in two equal branches: `dr_grpo` sums tokens, the others average."""
    learner = make_learner(model_path, loss=LOSSES[objective])
    samples = make_samples()
    *_, last = samples
    whole, branching, alone = (
        gradient_of(learner, build_batch(batch, microbatch_tokens=12))
        for batch in (samples, [*samples, replace(last, branch=1)], [last])
    )
    added = alone / 4 if objective == "dr_grpo" else torch.zeros_like(alone)
    assert (branching - whole - added).abs().max() < 1e-3 * alone.abs().max()


@pytest.mark.parametrize("named_in", ["generation_config.json", "config.json"])
def test_a_turn_that_ended_with_another_of_the_models_ends_is_replayed_with_the_choice_that_it_had(tmp_path, named_in):
    """Where the grammar is done the sampler may take any end that the model names."""
    path = save_tiny_model(tmp_path / "model", "llama")
    (path / "generation_config.json").unlink()
    said = json.loads((path / named_in).read_text()) if named_in == "config.json" else {}
    (path / named_in).write_text(json.dumps(said | {"eos_token_id": [1, 9]}))
    learner = make_learner(path)
    span = GrammarSpan(start=2, end=6, grammar=GRAMMAR)
    found = learner.policy.logprobs([replace(sample([6, 7, 2, 5, 3, 9], [2, 3, 4, 5]), grammar_spans=(span,))])[0]
    ids = torch.tensor([[6, 7, 2, 5, 3]])
    ends = learner.policy.model(input_ids=ids, tree_blocks=plain_blocks(5)).logits[0, 4, [1, 9]]
    assert found[5].item() == pytest.approx(ends.log_softmax(0)[1].item(), abs=1e-5)
    assert found[5] < -0.1


def masked(one, *positions):
    """The sample without some of its trained tokens, as if they were too old."""
    mask = one.loss_mask.copy()
    mask[list(positions)] = False
    return replace(one, loss_mask=mask, num_masked_tokens=one.num_loss_tokens - int(mask.sum()))


@pytest.mark.parametrize("masked_out", [(2,), (3,), (4,), (2, 3), (2, 4), (3, 4)])
def test_tokens_masked_for_their_age_leave_the_others_log_probs_under_the_grammar(model_path, masked_out):
    learner = make_learner(model_path)
    whole = learner.policy.logprobs([grammar_turn()])[0].detach()
    assert -2 < whole[3] < 0
    assert (whole[2], whole[4]) == (0, 0)
    found = learner.policy.logprobs([masked(grammar_turn(), *masked_out)])[0]
    kept = [position for position in range(5) if position not in masked_out]
    assert not found[list(masked_out)].any()
    # Fewer rows in the output head may add up in another order on some processors.
    assert torch.allclose(found[kept], whole[kept], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        replace(sample([6, 7, 9, 11], [2, 3], name="free")),
        replace(sample([6, 7, 2, 5], [2, 3], name="free")),
        replace(sample([6, 7, 2, 5], [2, 3], name="cooler"), temperature=0.5),
        replace(
            sample([6, 7, 2, 6], [2, 3], name="other"),
            grammar_spans=(GrammarSpan(start=2, end=4, grammar='root ::= "{" ("w2" | "w3" | "w4")'),),
        ),
    ],
    ids=["free", "free, the same tokens", "another temperature", "another grammar"],
)
def test_one_prompt_that_was_sampled_in_two_ways_has_a_distribution_for_each(model_path, other):
    """Regression: an agent that asks again with a tool it must call got the masks of one reply for the other: log-probs
    of 0 or -inf, and batches that the guard refused."""
    learner = make_learner(model_path)
    samples = [grammar_turn(), other]
    alone = [learner.policy.logprobs([one])[0].detach() for one in samples]
    for order in ((0, 1), (1, 0)):
        together = learner.policy.logprobs([samples[place] for place in order]).detach()
        for row, place in enumerate(order):
            found = together[row, : len(alone[place])]
            assert torch.allclose(found, alone[place], rtol=0, atol=1e-6), (order, place)
    assert alone[1][2] < 0 or other.grammar_spans


def test_gradient_checkpointing_changes_no_gradient(model_path):
    batch = build_batch(make_samples(), microbatch_tokens=1000)
    kept, computed_again = (
        gradient_of(make_learner(model_path, gradient_checkpointing=again), batch) for again in (False, True)
    )
    assert kept.abs().max() > 0
    assert torch.allclose(computed_again, kept, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_base_that_was_trained_with_dropout_gives_the_same_numbers_in_every_pass(tmp_path, architecture, checkpointing):
    """Also where something has put the model into training mode."""
    plain, dropping = (
        make_learner(
            save_tiny_model(tmp_path / str(dropout), architecture, attention_dropout=dropout),
            gradient_checkpointing=checkpointing,
        )
        for dropout in (0.0, 0.5)
    )
    assert dropping.policy.model.config.attention_dropout == 0.5
    batch = build_batch(make_samples(), microbatch_tokens=20)
    expected = gradient_of(plain, batch)
    for _ in range(2):
        assert torch.equal(gradient_of(dropping, batch), expected)
        dropping.policy.model.train()


def test_gradient_is_the_one_of_a_plain_padded_batch(model_path):
    learner = make_learner(model_path, correction="none")
    stale = [replace(one, ages=np.where(one.loss_mask, 1, -1)) for one in make_samples()]
    samples = [one for one in stale if one.temperature == 1.0]
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
    learner = make_learner(model_path, learning_rate=1e-2)
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


@pytest.mark.parametrize("samples", [[], [sample([5, 6, 7], [], name="x")]])
def test_batch_without_loss_tokens_changes_nothing_but_the_version_and_says_so(model_path, samples):
    learner = make_learner(model_path)
    before = learner.adapter().digest
    result = learner.train_step(build_batch(samples, microbatch_tokens=100))
    assert learner.adapter().digest == before
    assert result.policy_version == 1
    assert result.skipped.startswith("step skipped: the batch has no sampled tokens to train on")
    assert (result.metrics["policy/staleness_max"], result.metrics["policy/logprob_gap_abs"]) == (0, 0)


def test_kl_of_the_first_rl_step_is_zero_after_a_cold_start_and_grows_from_there(model_path):
    learner = make_learner(model_path, loss=LOSSES["flow_grpo"], learning_rate=1e-2)
    for _ in range(3):
        learner.imitate_step(make_samples(), learning_rate=1e-2)
    cold_started = learner.adapter().digest
    learner.set_reference()
    assert learner.adapter().digest == cold_started
    batch = build_batch(make_samples(), microbatch_tokens=20)
    divergence = [learner.train_step(batch).metrics["policy/kl_ref_k3"] for _ in range(2)]
    assert divergence[0] == 0 < divergence[1]


def test_settings_of_adam_reach_the_optimizer(model_path):
    """Without them it is torch's."""
    plain, other = (make_learner(model_path, **more) for more in ({}, {"adam_betas": (0.8, 0.95), "adam_eps": 1e-6}))
    found = [(one.optimizer.param_groups[0]["betas"], one.optimizer.param_groups[0]["eps"]) for one in (plain, other)]
    assert found == [((0.9, 0.999), 1e-8), ((0.8, 0.95), 1e-6)]


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


def test_changed_or_half_written_checkpoint_is_named_and_refused(model_path, tmp_path):
    learner = make_learner(model_path)
    folder = save_checkpoint(learner, tmp_path, keep=2)
    (folder / "optimizer.pt").write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"optimizer\.pt: sha256"):
        load_checkpoint(learner, folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load_checkpoint(learner, folder)


def test_a_choice_between_the_last_tokens_of_a_word_of_the_mask_is_one(tmp_path):
    """Regression: of a negative word the bits of its absolute value were counted, which is one for tokens 30 and 31."""
    folder = save_tiny_model(tmp_path / "model", "llama")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w26"', '"yes"').replace('"w27"', '"no"'))
    span = GrammarSpan(start=2, end=5, grammar='root ::= "{" ("yes" | "no") "}"')
    samples = [replace(sample([6, 7, 2, said, 3], [2, 3, 4]), grammar_spans=(span,)) for said in (30, 31)]
    found = make_learner(folder).policy.logprobs(samples).detach()
    assert found[:, 3].exp().sum() == pytest.approx(1.0, abs=1e-5)
    assert found[:, [2, 4]].tolist() == [[0, 0], [0, 0]]
