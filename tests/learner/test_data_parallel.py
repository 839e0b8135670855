"""A learner in two processes takes the same steps as one in a single process."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
from tiny import sample, save_tiny_model

from learner import optim
from learner.checkpoint import load_checkpoint, newest_checkpoint

ROOT = Path(__file__).parents[2]
SIZE = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def model_path(folder):
    return save_tiny_model(folder / "model", "llama")


@pytest.fixture(scope="module")
def alone(folder, model_path):
    """Run the steps of each loss in this process. The ranks resume from the checkpoint of `dapo`."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(optim, "MAX_GRAD_NORM", ranks.MAX_GRAD_NORM)
    results = {
        loss: ranks.run_steps(ranks.make_learner(model_path, loss), folder / ("alone" if loss == "dapo" else loss))
        for loss in ranks.CASES
    }
    monkeypatch.undo()
    return results


@pytest.fixture(scope="module")
def together(folder, model_path, alone):
    """Run the same steps in several processes, and return the results of each."""
    target = folder / "together"
    target.mkdir()
    command = [sys.executable, str(Path(ranks.__file__)), str(model_path), str(target), str(SIZE)]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(target / f"rank-{rank}.pt", weights_only=False) for rank in range(SIZE)]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ranks.CASES)
def test_ranks_have_the_weights_and_metrics_of_one_process(model_path, alone, together, loss):
    """The steps include clipped, skipped and empty ones. Adam divides by the size of the gradient, so weights with
    almost no gradient differ by up to 1% of a step."""
    expected = alone[loss]
    for results in together:
        found = results[loss]
        assert found["version"] == expected["version"] == 5
        assert (found["weights"] - expected["weights"]).abs().max() < 1e-4
        for metrics, expected_metrics in zip(found["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5, nan_ok=True)
        assert found["logprobs"].keys() == expected["logprobs"].keys()
        for name, values in expected["logprobs"].items():
            assert found["logprobs"][name] == pytest.approx(values, abs=1e-4)
    found = [results[loss] for results in together]
    assert len({result["digest"] for result in found}) == 1
    assert all(result["skipped"] == found[0]["skipped"] for result in found)
    # The sample without finite log-probs is on one rank only.
    assert [reason is not None for reason in found[0]["skipped"]] == [False, False, False, True, False, True, False]
    # DeepSpeed's default bucket has 500 million gradients, 1.86 GiB.
    trained = ranks.make_learner(model_path, "dapo").policy.trainable_parameters()
    assert found[0]["bucket"] == sum(parameter.numel() for parameter in trained)


@pytest.mark.slow
def test_checkpoints_are_resumed_by_another_number_of_processes(monkeypatch, folder, model_path, alone, together):
    monkeypatch.setattr(optim, "MAX_GRAD_NORM", ranks.MAX_GRAD_NORM)
    for results in together:
        assert (results["resumed"]["weights"] - alone["dapo"]["weights"]).abs().max() < 1e-5
    learner = ranks.make_learner(model_path, "dapo")
    load_checkpoint(learner, newest_checkpoint(folder / "together" / "resumed")[0].folder)
    assert (ranks.one_more_step(learner)["weights"] - together[0]["twice"]["weights"]).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("lengths", "shares"),
    [
        ((2, 9, 3, 8, 4), [[9, 4, 2], [8, 3, 0]]),
        ((2, 9, 3, 8, 4), [[9, 8, 4, 3, 2]]),
        ((2, 9), [[9], [2], [0], [0]]),
        ((), [[], []]),
    ],
)
def test_ranks_have_equally_many_passes_of_similar_size(lengths, shares):
    microbatches = [(sample(range(length), [1]),) for length in lengths]
    for rank, expected in enumerate(shares):
        one = SimpleNamespace(ranks=optim.Ranks(rank=rank, size=len(shares)))
        found = optim.ShardedAdamW.share(one, microbatches)
        assert [sum(len(row.token_ids) for row in rows) for rows in found] == expected
