"""A learner in several processes is a learner in one: these tests run the same steps in one, two and four."""

import os
import subprocess
import sys
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import ranks
import torch
from tiny import sample, save_tiny_model

from learner.checkpoint import load_checkpoint, newest_checkpoint
from learner.optim import Ranks, join
from learner.packing import num_distinct_tokens, pack, share_out, split_microbatches

ROOT = Path(__file__).parents[2]
CASES = list(product(ranks.OBJECTIVES, ranks.STAGES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model_path(folder):
    return save_tiny_model(folder / "model", "llama")


@pytest.fixture(scope="module")
def alone(folder, model_path):
    """By objective, what one process saw; the checkpoint of one of them is gone on from."""
    accounts = {
        objective: ranks.account_of(ranks.make_learner(model_path, objective), _checkpoints(folder, objective))
        for objective in ranks.OBJECTIVES
    }
    learner = ranks.make_learner(model_path, "dapo", dtype="bfloat16")
    accounts["mixed"] = ranks.gradient_of(learner)
    return accounts


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.faults)])
def together(request, folder, model_path, alone):
    """What each of several processes saw."""
    size = request.param
    own = folder / str(size)
    own.mkdir()
    command = [sys.executable, str(Path(ranks.__file__)), str(model_path), str(own), str(size)]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(own / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]


def _checkpoints(folder, objective):
    return folder / ("alone" if objective == "dapo" else f"alone-{objective}")


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "stage"), CASES)
def test_gradient_over_ranks_is_the_one_of_one_process(alone, together, objective, stage):
    expected = alone[objective]
    for one in together:
        found = one[objective, stage]
        assert (found["gradient"] - expected["gradient"]).abs().max() < 1e-6 < expected["gradient"].abs().max()
        assert found["norm"] == pytest.approx(expected["norm"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ranks.STAGES)
def test_gradient_in_bf16_over_ranks_is_the_one_of_one_process(alone, together, stage):
    expected = alone["mixed"]["gradient"]
    for one in together:
        assert (one["mixed", stage]["gradient"] - expected).abs().max() < 1e-6 < expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "stage"), CASES)
def test_steps_over_ranks_leave_the_weights_and_metrics_of_one_process(alone, together, objective, stage):
    """Supervised and RL steps, with a cut gradient, weight decay, a step that is skipped and one without samples. Adam
    divides by the size of the gradient, so where that is next to nothing weights differ by up to 1% of a step."""
    expected = alone[objective]
    for one in together:
        found = one[objective, stage]
        assert found["version"] == expected["version"] == 5
        assert (found["weights"] - expected["weights"]).abs().max() < 1e-4
        assert found["canary"] == pytest.approx(expected["canary"], abs=1e-4)
        for here, there in zip(found["metrics"], expected["metrics"], strict=True):
            assert here == pytest.approx(there, rel=1e-4, abs=1e-5, nan_ok=True)
        assert found["logprobs"].keys() == expected["logprobs"].keys()
        for name, values in expected["logprobs"].items():
            assert found["logprobs"][name] == pytest.approx(values, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "stage"), CASES)
def test_all_ranks_hold_the_same_weights_and_skip_the_same_steps(alone, together, objective, stage):
    accounts = [one[objective, stage] for one in together]
    assert len({one["digest"] for one in accounts}) == 1
    assert all(one["skipped"] == accounts[0]["skipped"] for one in accounts)
    # A sample without finite log-probs is on one rank only.
    assert [why is not None for why in accounts[0]["skipped"]] == [False, False, False, True, False, True, False]
    assert accounts[0]["skipped"][3].startswith("step skipped: policy/loss must be finite")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ranks.STAGES)
def test_checkpoint_of_one_process_is_gone_on_from_by_several(alone, together, stage):
    for one in together:
        assert (one["resumed", stage]["weights"] - alone["dapo"]["weights"]).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", ranks.STAGES)
def test_checkpoint_of_several_processes_is_gone_on_from_by_one(folder, model_path, together, stage):
    learner = ranks.make_learner(model_path, "dapo")
    load_checkpoint(learner, newest_checkpoint(folder / str(len(together)) / f"dapo-{stage}")[0].folder)
    found = ranks.go_on(learner)
    assert (found["weights"] - together[0]["dapo", stage]["weights"]).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("stage", ranks.STAGES)
def test_ranks_collect_gradients_in_a_bucket_as_large_as_the_adapter(model_path, together, stage):
    """DeepSpeed's own is of 500 million gradients, 1.86 GiB, which a card would have to hold."""
    trained = ranks.make_learner(model_path, "dapo").policy.trainable_parameters()
    assert together[0]["bucket", stage] == sum(parameter.numel() for parameter in trained)


@pytest.mark.slow
def test_ranks_wait_for_each_other_as_long_on_cards(monkeypatch):
    """NCCL's own patience ends after ten minutes, in which not every machine loads a large model."""
    import deepspeed  # noqa: F401  # before the environment below is undone

    asked = {}
    for name in ("DS_ACCELERATOR", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "cpu")
    monkeypatch.setattr("torch.distributed.TCPStore", lambda *_, **__: None)
    monkeypatch.setattr("torch.distributed.init_process_group", lambda backend, **options: asked.update(options))
    monkeypatch.setattr("deepspeed.init_distributed", lambda **_: None)
    join(Ranks(rank=1, size=2), ("127.0.0.1", 1), device="cuda", own=None, here="127.0.0.1")
    assert asked["timeout"] == timedelta(minutes=30)


def lengths(share):
    return [len(rows[0].token_ids) for rows in share]


def test_microbatches_are_shared_out_by_tokens():
    microbatches = [(sample(range(length), [1]),) for length in (2, 9, 3, 8, 4)]
    assert [lengths(share) for share in share_out(microbatches, 2)] == [[9, 3, 2], [8, 4]]
    assert [lengths(share) for share in share_out(microbatches, 1)] == [[9, 8, 4, 3, 2]]


def test_ranks_beyond_the_microbatches_get_none():
    microbatches = [(sample(range(length), [1]),) for length in (2, 9)]
    assert [lengths(share) for share in share_out(microbatches, 4)] == [[9], [2], [], []]
    assert share_out([], 2) == ((), ())


def test_tokens_of_a_microbatch_are_those_of_its_packed_row():
    for rows in split_microbatches(ranks.make_samples(), 30):
        assert num_distinct_tokens(rows) == len(pack(rows).token_ids)
