"""When a card is shared, and what is reserved then."""

from types import SimpleNamespace

import pytest

from configs.loading import load_run_config
from ray_jobs.run import resources

ON_CARDS = ("rollout.engine.device=cuda", "rollout.engine.adapter_mode=native", "learner.device=cuda")


def reserved(monkeypatch, *overrides):
    asked = []
    monkeypatch.setattr(resources, "placement_group", lambda bundles, *_, **__: asked.extend(bundles))
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(resources.ray, "get_runtime_context", lambda: context)
    resources.place_learner(load_run_config(None, [*ON_CARDS, *overrides]))
    return asked


def test_a_shared_card_is_one_bundle_of_a_whole_card(monkeypatch):
    assert reserved(monkeypatch, "card.shared=true") == [{"CPU": 2.0, "GPU": 1.0}]


def test_without_sharing_the_learner_reserves_its_share(monkeypatch):
    assert reserved(monkeypatch, "card.learner=0.3") == [{"CPU": 1.0, "GPU": 0.3}]


@pytest.mark.parametrize(
    "changes",
    [
        ("card.shared=false",),
        ("learner.device=cpu",),
        ("learner.num_workers=2",),
        ("rollout.engine.tensor_parallel=2",),
    ],
)
def test_nothing_is_shared_over_several_cards_or_none(changes):
    assert not load_run_config(None, [*ON_CARDS, "card.shared=true", *changes]).shares_card


def test_trainers_may_grow_their_memory_in_place_and_keep_a_cpus():
    card, cpu = resources.training_env(2, "cuda"), resources.training_env(2, "cpu")
    assert card["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in resources.thread_env(2)
    assert not [name for name in card if name.startswith("MALLOC_")]  # a model passes through here on its way to a card
    assert int(cpu["MALLOC_TRIM_THRESHOLD_"]) == 64 * 2**30
