"""Weights read back out of memory that holds others than it was given."""

import pytest
import torch

from rollout.engines.read_back import MergedColumns, ReadBack, together
from tests.rollout.simulated_memory import TARGETS, MergedMemory, adapter_versions, read_native, save_base

STEP_SIZES = (1e-6, 1e-5, 1e-4, 1e-3)


@pytest.fixture
def merger(tmp_path):
    return save_base(tmp_path, torch.Generator().manual_seed(0))


def versions_of(step_size, count=6, targets=TARGETS):
    return adapter_versions(torch.Generator().manual_seed(1), step_size=step_size, count=count, targets=targets)


@pytest.mark.parametrize("step_size", STEP_SIZES)
def test_no_earlier_version_in_memory_passes_as_the_newest(merger, tmp_path, step_size):
    *earlier, newest = versions_of(step_size)
    old = MergedMemory(merger)
    for version in earlier:
        assert old.load(version).fault is None
    for memory in (old, MergedMemory(merger)):
        for held in earlier:
            assert "memory holds weights" in memory.load(newest, held=held).fault
        assert memory.load(newest).fault is None
    assert read_native(tmp_path / "native", newest, newest).fault is None
    for held in earlier:
        assert "memory holds weights" in read_native(tmp_path / "native", newest, held).fault


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("k_proj", "o_proj")])
def test_adapter_of_some_parts_of_a_joined_layer_is_read_back_in_both_modes(merger, tmp_path, targets):
    """PEFT's own choice for Llama is q_proj and v_proj; vLLM computes both in one layer with k_proj."""
    *earlier, newest = versions_of(1e-4, targets=targets)
    memory = MergedMemory(merger, columns=MergedColumns(targets))
    assert memory.load(newest).fault is None
    assert read_native(tmp_path / "native", newest, newest).fault is None
    for held in earlier:
        assert "memory holds weights" in memory.load(newest, held=held).fault
        assert "memory holds weights" in read_native(tmp_path / "native", newest, held).fault


def test_layer_that_the_engine_lacks_is_not_held(merger):
    (version,) = versions_of(1e-4, count=1)
    memory = MergedMemory(merger)
    memory.load(version)
    del memory.layers["model.layers.1.self_attn.o_proj"]
    assert memory.columns.read(memory).fault is not None


def test_share_of_every_worker_counts():
    right, wrong = ReadBack(given="a", held="a"), ReadBack(given="b", held="c")
    assert together([right, right]).fault is None
    assert together([right, wrong]).fault is not None
    assert together([right]) is right
