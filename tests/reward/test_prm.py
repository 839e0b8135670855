import math
import random

import pytest
import torch
from tiny import save_tiny_model

from configs.errors import UserError
from configs.reward import PrmConfig
from envs.types import Task
from reward.judging import PrmError
from reward.prm import model as prm_module
from reward.prm import training
from reward.prm.model import ProcessRewardModel, prm_settings
from reward.prm.step_text import step_texts
from reward.prm.training import LabelledStep, num_batches, train_prm
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory

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
    return prm


def make_turn(*, thought="w1", tool_input="w2", result="w3"):
    return decided("think", tool_input, result, thought=thought)


def make_steps(*turns, question="w7 w8", index=0):
    task = Task(id=f"t{index}", dataset="lookup", question=question, answer="42")
    return step_texts(make_trajectory(*turns, task=task, id=f"g/{index}", answer=None))


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


@pytest.mark.parametrize(("float32", "tolerance"), [(True, 1e-6), (False, ROUNDING)])
def test_score_does_not_depend_on_batch_mates_and_later_steps(model_path, float32, tolerance):
    prm, steps = make_prm(model_path, float32=float32), some_steps()
    together = prm.score(steps)
    assert largest_change(together, [prm.score([step])[0] for step in steps]) < tolerance
    small = make_prm(model_path, float32=float32, microbatch_tokens=64)
    assert largest_change(together, small.score(steps)) < tolerance


def test_saved_prm_loads_with_equal_scores_and_digest(llama_path, tmp_path):
    steps, prm = some_steps(), make_prm(llama_path, num_layers=1)
    prm.save(tmp_path / "prm", labeller="plan")
    loaded = make_prm(llama_path, seed=1, num_layers=1)
    assert loaded.score(steps) != prm.score(steps)
    loaded.load(tmp_path / "prm")
    assert loaded.score(steps) == prm.score(steps)
    assert loaded.digest == prm.digest != ""
    current = {"device": "cuda", "num_threads": 5, "microbatch_tokens": 77}
    assert prm_settings(tmp_path / "prm", PrmConfig(**current)) == prm.config.model_copy(update=current)
    assert [path.name for path in tmp_path.iterdir()] == ["prm"]


@pytest.mark.parametrize("flipped", ["prm.safetensors", "prm.json", None])
def test_prm_with_a_flipped_byte_or_of_another_renderer_is_rejected(llama_path, tmp_path, monkeypatch, flipped):
    prm = make_prm(llama_path)
    prm.save(tmp_path / "prm")
    if flipped:
        data = bytearray((tmp_path / "prm" / flipped).read_bytes())
        data[-5] ^= 1
        (tmp_path / "prm" / flipped).write_bytes(data)
    else:
        monkeypatch.setattr(prm_module, "RENDERER_VERSION", "another-renderer")
    before = prm.score(some_steps(2))
    with pytest.raises(UserError):
        prm.load(tmp_path / "prm")
    assert prm.score(some_steps(2)) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_weights_are_an_error_and_never_a_score(llama_path, value):
    prm = make_prm(llama_path)
    prm.head.weight.data.fill_(value)
    prm.head.bias.data.fill_(math.nan)
    with pytest.raises(PrmError):
        prm.score(some_steps(1))


def test_training_lowers_the_loss_and_orders_held_out_steps(llama_path, monkeypatch):
    monkeypatch.setattr(training, "BATCH_TASKS", 8)
    monkeypatch.setattr(training, "JUNK_SHARE", 0)
    prm = make_prm(llama_path, trained=False, learning_rate=4e-3, num_epochs=6)
    data = toy_data(range(96))
    losses = list(train_prm(prm, data, seed=0))
    assert len(losses) == num_batches(data, num_epochs=6) == 72
    # Every score starts at 0.5, 0.4 off its label.
    assert losses[0] == pytest.approx(0.16, abs=1e-3)
    assert sum(losses[-12:]) / 12 < 0.08
    held_out = toy_data(range(100, 140), seed=1)
    scores = prm.score([labelled.step for labelled in held_out])
    good = [score for score, labelled in zip(scores, held_out, strict=True) if labelled.label > 0.5]
    bad = [score for score, labelled in zip(scores, held_out, strict=True) if labelled.label < 0.5]
    assert sum(a > b for a in good for b in bad) > 0.8 * len(good) * len(bad)


def test_junk_is_trained_on_as_worthless(llama_path, monkeypatch):
    """The labels say that everything is good; only the junk can lower a score."""
    monkeypatch.setattr(training, "BATCH_TASKS", 8)
    monkeypatch.setattr(training, "JUNK_SHARE", 1)
    prm = make_prm(llama_path, trained=False, learning_rate=4e-3, num_epochs=4)
    data = [replace(labelled, label=1.0) for labelled in toy_data(range(64))]
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


def test_a_gradient_that_is_not_finite_names_the_setting(llama_path):
    prm = make_prm(llama_path)
    prm.head.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match=r"prm\.learning_rate"):
        list(train_prm(prm, toy_data(range(4)), seed=0))


def test_gradients_of_equal_steps_are_added_in_one_order(llama_path):
    """torch adds the gradients of a row that is indexed repeatedly from several threads, in no fixed order."""
    prm = make_prm(llama_path, float32=True, num_threads=2)
    rows = prm.rows(some_steps(3)) * 2000
    weights = torch.randn(len(rows), generator=torch.Generator().manual_seed(0))
    seen = set()
    for _ in range(8):
        (prm.predict(rows) * weights).sum().backward()
        gradients = [weight.grad for weight in prm.backbone.trainable_parameters() if weight.grad is not None]
        seen.add(tuple(float(gradient.double().sum()) for gradient in gradients))
        prm.backbone.model.zero_grad()
    assert len(seen) == 1
