"""What the learner hands to dynamic sampling, and what stays in its checkpoint."""

import asyncio
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from tiny import make_learner, save_tiny_model

from actors import dynamic_sampling
from actors import learner as actor
from actors.dynamic_sampling import DynamicSampling
from actors.learner import LearnerActor
from configs.run import RunConfig
from learner.types import Adapter


class ScriptedSampling:
    """Keeps what it is told to publish."""

    def __init__(self):
        self.told = []
        self.publish = SimpleNamespace(remote=self.told.append)


def learner_in_this_process(config, learner):
    actor = LearnerActor.__ray_metadata__.modified_class(config, 0, 1)
    actor.build(lambda: learner, None, lambda: True)
    return actor


@pytest.mark.parametrize(("mode", "dtype"), [("native", torch.bfloat16), ("merged", torch.float32)])
def test_workers_get_the_engines_type_where_it_rounds_to_it_and_the_checkpoint_keeps_float32(
    tmp_path, monkeypatch, mode, dtype
):
    monkeypatch.setattr(actor.ray, "get", lambda answer: answer)
    engine = {"adapter_mode": mode, "dtype": "bfloat16"}
    config = RunConfig.model_validate({"rollout": {"engine": engine}})
    sampling = ScriptedSampling()
    calls = learner_in_this_process(config, make_learner(save_tiny_model(tmp_path / "model", "llama")))
    calls.publish(sampling)
    kept = calls.save_checkpoint(tmp_path / "checkpoints") / "adapter.safetensors"
    assert {one.dtype for one in safetensors.torch.load(sampling.told[0].data).values()} == {dtype}
    assert {one.dtype for one in safetensors.torch.load_file(kept).values()} == {torch.float32}


def test_two_starts_of_the_learner_never_have_one_version_number(monkeypatch):
    """The first was replaced while its publication had not ended."""
    monkeypatch.setattr(dynamic_sampling.ray, "put", lambda data: data)
    sampling = DynamicSampling.__ray_metadata__.modified_class(RunConfig())

    def adapter(version):
        return Adapter(policy_version=version, data=f"adapter {version}".encode(), digest="")

    async def published():
        assert await sampling.next_version() == 0
        await sampling.publish(adapter(0))
        stalled = asyncio.create_task(sampling.publish(adapter(3)))
        await asyncio.sleep(0)
        numbers = [await sampling.next_version(), await sampling.next_version()]
        await stalled
        await sampling.publish(adapter(numbers[1]))
        with pytest.raises(ValueError):
            await sampling.publish(adapter(numbers[0]))
        return numbers, await sampling.wait_newer(-1)

    numbers, newest = asyncio.run(published())
    assert (numbers, newest) == ([4, 5], (5, (b"adapter 5",)))
