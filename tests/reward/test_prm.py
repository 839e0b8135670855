import math
import random

import pytest
import torch
from tiny import save_tiny_model

from configs.errors import UserError
from configs.reward import PrmConfig
from envs.types import Task, ToolCall, ToolResult
from reward.prm import model as prm_module
from reward.prm.model import PrmError, ProcessRewardModel, prm_settings
from reward.prm.step_text import step_texts
from reward.prm.training import LabelledStep, num_batches, train_prm
from rollout.types import Completion, Trajectory, Turn
from tests.changed import replace

ROUNDING = 5e-3
"""Of matrix products in bf16, whose last bit is 4e-3; the scores below spread over more than 0.2."""


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model_path(request, tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama_path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


def make_prm(model_path, *, seed=0, trained=True, float32=False, **config):
    """With `trained`, random weights in adapter and head stand for a trained PRM's."""
    prm = ProcessRewardModel(model_path, PrmConfig(**{"lora_rank": 4, "num_threads": 1, **config}), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    if trained:
        for parameter in prm.backbone.trainable_parameters():
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        prm.head.weight.data = 0.3 * torch.randn(prm.head.weight.shape, generator=generator)
    if float32:
        prm.backbone.model.float()
        prm.backbone._mixed_precision = False
    return prm


def make_turn(*, thought="w1", tool_input="w2", result="w3"):
    completion = Completion(token_ids=(1,), logprobs=(0.0,), text="w1", finish_reason="stop", policy_version=1)
    return Turn.of(
        role="planner",
        prompt_token_ids=(1,),
        completion=completion,
        trainable=True,
        thought=thought,
        tool_call=ToolCall(name="think", arguments=tool_input),
        tool_result=ToolResult(text=result),
    )


def make_trajectory(*turns, question="w7 w8", index=0):
    task = Task(id=f"t{index}", dataset="arith", question=question, answer="42")
    return Trajectory(id=f"g/{index}", group_id="g", task=task, turns=turns, answer=None, stop_reason="answered")


def make_steps(*turns, **trajectory):
    return step_texts(make_trajectory(*turns, **trajectory))


def words(count, rng):
    return " ".join(f"w{rng.randrange(60)}" for _ in range(count))


def some_steps(num_trajectories=10, *, seed=0):
    """Steps of unequal lengths; the trajectories share no question, their own steps share prefixes."""
    rng = random.Random(seed)
    steps = []
    for index in range(num_trajectories):
        turns = [make_turn(thought=words(rng.randrange(1, 12), rng), tool_input=words(3, rng)) for _ in range(3)]
        steps += make_steps(*turns, question=words(6, rng), index=index)
    return steps


def largest_change(left, right):
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def toy_data(indices, *, seed=0):
    """One step per task. Its thought holds `w1` where it is good and `w2` where it is bad, among other words."""
    rng = random.Random(seed)
    data = []
    for index in indices:
        good = index % 2 == 0
        others = [f"w{rng.randrange(10, 60)}" for _ in range(3)]
        others.insert(rng.randrange(4), "w1" if good else "w2")
        (step,) = make_steps(make_turn(thought=" ".join(others), tool_input="w5"), question=words(3, rng), index=index)
        data.append(LabelledStep(step=step, label=0.9 if good else 0.1))
    return data


def test_untrained_prm_has_no_opinion(model_path):
    assert set(make_prm(model_path, trained=False).score(some_steps(2))) == {0.5}


def test_scores_are_in_the_unit_interval_and_differ(model_path):
    scores = make_prm(model_path).score(some_steps())
    assert all(0 <= score <= 1 for score in scores)
    assert max(scores) - min(scores) > 0.2


def test_scores_of_no_steps_are_none_at_all(llama_path):
    assert make_prm(llama_path).score([]) == []


@pytest.mark.parametrize(("float32", "tolerance"), [(True, 1e-6), (False, ROUNDING)])
def test_score_does_not_depend_on_batch_mates(model_path, float32, tolerance):
    prm, steps = make_prm(model_path, float32=float32), some_steps()
    together = prm.score(steps)
    assert largest_change(together, [prm.score([step])[0] for step in steps]) < tolerance
    small = make_prm(model_path, float32=float32, microbatch_tokens=64)
    assert largest_change(together, small.score(steps)) < tolerance


def test_score_does_not_depend_on_the_order(model_path):
    prm, steps = make_prm(model_path), some_steps()
    order = random.Random(1).sample(range(len(steps)), len(steps))
    there, back = prm.score(steps), prm.score([steps[index] for index in order])
    assert back == [there[index] for index in order]


def test_score_does_not_depend_on_the_steps_own_result_but_a_later_one_does(model_path):
    prm = make_prm(model_path)
    one = prm.score(make_steps(make_turn(result="w3"), make_turn()))
    other = prm.score(make_steps(make_turn(result="w40 w41 w42"), make_turn()))
    assert abs(one[0] - other[0]) < ROUNDING
    assert abs(one[1] - other[1]) > ROUNDING


def test_score_does_not_depend_on_later_steps(model_path):
    prm = make_prm(model_path, float32=True)
    turns = [make_turn(thought=f"w{index}", tool_input=f"w{index + 20}") for index in range(4)]
    whole = prm.score(make_steps(*turns))
    for length in range(1, 4):
        assert largest_change(whole[:length], prm.score(make_steps(*turns[:length]))) < 1e-6


def test_saved_prm_loads_with_equal_scores_and_digest(model_path, tmp_path):
    steps, prm = some_steps(), make_prm(model_path, num_layers=1)
    prm.save(tmp_path / "prm", labeller="plan")
    loaded = make_prm(model_path, seed=1, num_layers=1)
    assert loaded.score(steps) != prm.score(steps)
    loaded.load(tmp_path / "prm")
    assert loaded.score(steps) == prm.score(steps)
    assert loaded.digest == prm.digest != ""
    assert prm_settings(tmp_path / "prm", prm.config) == prm.config
    assert [path.name for path in tmp_path.iterdir()] == ["prm"]


def test_saved_prm_computes_as_the_machine_that_uses_it_is_told(model_path, tmp_path):
    """Regression: one that was trained on a card asked for a card for ever, whatever prm.device said."""
    make_prm(model_path, num_layers=1, max_tokens=64).save(tmp_path / "prm")
    here = PrmConfig(device="cuda", num_threads=5, microbatch_tokens=77)
    found = prm_settings(tmp_path / "prm", here)
    assert (found.device, found.num_threads, found.microbatch_tokens) == ("cuda", 5, 77)
    assert (found.num_layers, found.max_tokens) == (1, 64)


def test_saving_again_replaces_the_prm_and_other_weights_have_another_digest(llama_path, tmp_path):
    prm = make_prm(llama_path)
    prm.save(tmp_path / "prm")
    before = prm.digest
    prm.head.bias.data += 1
    prm.save(tmp_path / "prm")
    loaded = make_prm(llama_path)
    loaded.load(tmp_path / "prm")
    assert loaded.digest == prm.digest != before


def test_prm_of_another_renderer_is_refused(llama_path, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(prm_module, "RENDERER_VERSION", "another-renderer")
        make_prm(llama_path).save(tmp_path / "prm")
    with pytest.raises(UserError):
        make_prm(llama_path).load(tmp_path / "prm")


@pytest.mark.parametrize("name", ["prm.safetensors", "prm.json"])
def test_flipped_byte_is_refused_and_changes_no_weights(llama_path, tmp_path, name):
    prm = make_prm(llama_path)
    prm.save(tmp_path / "prm")
    before = prm.score(some_steps(2))
    data = bytearray((tmp_path / "prm" / name).read_bytes())
    data[-5] ^= 1
    (tmp_path / "prm" / name).write_bytes(data)
    with pytest.raises(UserError):
        prm.load(tmp_path / "prm")
    assert prm.score(some_steps(2)) == before


def test_missing_file_is_refused(llama_path, tmp_path):
    prm = make_prm(llama_path)
    prm.save(tmp_path / "prm")
    (tmp_path / "prm" / "prm.safetensors").unlink()
    with pytest.raises(UserError):
        prm.load(tmp_path / "prm")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_are_an_error_and_never_a_score(llama_path, value):
    prm = make_prm(llama_path)
    prm.head.weight.data.fill_(value)
    prm.head.bias.data.fill_(math.nan)
    with pytest.raises(PrmError):
        prm.score(some_steps(1))


def test_decision_that_is_too_long_is_unscored_and_others_keep_their_scores(llama_path):
    prm = make_prm(llama_path, float32=True, max_tokens=32)
    short = make_steps(make_turn(), make_turn(tool_input="w30"))
    (long,) = make_steps(make_turn(thought=words(40, random.Random(0))), index=1)
    scores = prm.score([short[0], long, short[1]])
    assert scores[1] is None
    assert largest_change([scores[0], scores[2]], prm.score(short)) < 1e-6


def test_context_that_is_too_long_is_cut_and_the_decision_still_decides(llama_path):
    prm = make_prm(llama_path, max_tokens=32)
    turns = [make_turn(thought=words(12, random.Random(index))) for index in range(4)]
    last = make_steps(*turns)[-1]
    assert [len(row.token_ids) <= 32 for row in prm.rows([last])] == [True]
    other = replace(last, decision=last.decision.replace("w2", "w50"))
    assert other != last
    assert abs(prm.score([last])[0] - prm.score([other])[0]) > ROUNDING


def test_training_lowers_the_loss_and_orders_held_out_steps(model_path):
    prm = make_prm(model_path, trained=False, learning_rate=4e-3, num_epochs=6, batch_tasks=8, junk_share=0)
    data = toy_data(range(96))
    losses = list(train_prm(prm, data, seed=0))
    assert len(losses) == num_batches(data, num_epochs=6, batch_tasks=8) == 72
    # Every score starts at 0.5, 0.4 off its label.
    assert losses[0] == pytest.approx(0.16, abs=1e-3)
    assert sum(losses[-12:]) / 12 < 0.08
    held_out = toy_data(range(100, 140), seed=1)
    scores = prm.score([one.step for one in held_out])
    good = [score for score, one in zip(scores, held_out, strict=True) if one.label > 0.5]
    bad = [score for score, one in zip(scores, held_out, strict=True) if one.label < 0.5]
    assert sum(a > b for a in good for b in bad) > 0.8 * len(good) * len(bad)


def test_junk_is_trained_on_as_worthless(llama_path):
    """The labels say that everything is good; only the junk can lower a score."""
    prm = make_prm(llama_path, trained=False, learning_rate=4e-3, num_epochs=4, batch_tasks=8, junk_share=1)
    data = [replace(one, label=1.0) for one in toy_data(range(64))]
    list(train_prm(prm, data, seed=0))
    (junk,) = make_steps(make_turn(thought="Okay.", tool_input="ok ok ok"))
    assert prm.score([junk])[0] < 0.3 < 0.5 < prm.score([data[0].step])[0]


def test_training_twice_with_one_seed_gives_equal_weights(llama_path, tmp_path):
    digests = []
    for seed in (3, 3, 4):
        prm = make_prm(llama_path, seed=seed, trained=False, learning_rate=1e-2, num_epochs=2)
        list(train_prm(prm, toy_data(range(12)), seed=seed))
        prm.save(tmp_path / "prm")
        digests.append(prm.digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_gradient_that_is_not_finite_says_what_to_lower(llama_path):
    prm = make_prm(llama_path)
    prm.head.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match=r"prm\.learning_rate"):
        list(train_prm(prm, toy_data(range(4)), seed=0))


def test_gradients_of_equal_steps_are_added_in_one_order(llama_path):
    """torch adds the float32 gradients of a row that was indexed more than once from several threads, as they come."""
    prm = make_prm(llama_path, float32=True, num_threads=2)
    rows = prm.rows(some_steps(3)) * 2000
    weights = torch.randn(len(rows), generator=torch.Generator().manual_seed(0))
    seen = set()
    for _ in range(8):
        (prm.predict(rows) * weights).sum().backward()
        gradients = [one.grad for one in prm.backbone.trainable_parameters() if one.grad is not None]
        seen.add(tuple(float(one.double().sum()) for one in gradients))
        prm.backbone.model.zero_grad()
    assert len(seen) == 1


def test_step_whose_decision_is_too_long_to_read_is_left_out_of_training(llama_path):
    data = toy_data(range(8))
    (long,) = make_steps(make_turn(thought=words(60, random.Random(0))), index=1)
    settings = {"trained": False, "max_tokens": 48, "junk_share": 0, "batch_tasks": 8, "num_epochs": 1}
    there = list(train_prm(make_prm(llama_path, **settings), [*data, LabelledStep(step=long, label=1.0)], seed=0))
    assert there == list(train_prm(make_prm(llama_path, **settings), data, seed=0))
