"""When a card is shared, and what is reserved then."""

import re
from types import SimpleNamespace

import pytest

from configs.errors import UserError
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


@pytest.mark.parametrize(("device", "expected"), [("cuda", "expandable_segments:False"), ("cpu", None)])
def test_the_holders_memory_can_be_exported_whatever_the_shell_says_of_its_allocator(monkeypatch, device, expected):
    monkeypatch.setattr(resources, "PlacementGroupSchedulingStrategy", lambda place: place)
    options = {}
    holder = SimpleNamespace(
        options=lambda **given: options.update(given) or SimpleNamespace(remote=lambda build: build)
    )
    monkeypatch.setattr(resources, "BaseWeightsActor", holder)
    resources.start_base(None, device, None, "base")
    assert options["runtime_env"]["env_vars"].get("PYTORCH_ALLOC_CONF") == expected


SHARED_BASE = ("card.shared=true", "card.share_base=true")


def test_the_holder_of_a_shared_base_takes_its_share_from_the_learners():
    both = load_run_config(None, [*ON_CARDS, *SHARED_BASE, "card.learner=0.4"])
    assert resources.learner_resources(both) == [{"CPU": 1.0, "GPU": pytest.approx(0.39)}]
    alone = load_run_config(None, [*ON_CARDS, "card.shared=true", "card.learner=0.4"])
    assert resources.learner_resources(alone) == [{"CPU": 1.0, "GPU": 0.4}]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("rollout.engine.adapter_mode=merged",), "adapter_mode = 'native', not 'merged'"),
        (("card.shared=false",), "needs card.shared = true"),
        (("learner.device=cpu",), "learner.device = 'cpu'"),
        (("learner.num_workers=2",), "learner.num_workers = 2"),
        (("rollout.engine.tensor_parallel=2",), "tensor_parallel = 2"),
        (("learner.dtype=float32",), "learner.dtype is float32, rollout.engine.dtype bfloat16"),
        (("card.learner=0.01",), "card.learner = 0.01 must be more than the 0.01"),
    ],
)
def test_a_base_that_cannot_be_shared_is_refused_with_the_setting(changes, says):
    with pytest.raises(UserError, match=re.escape(says)):
        load_run_config(None, [*ON_CARDS, *SHARED_BASE, *changes])


def test_on_cpus_a_base_is_shared_only_in_a_cluster_of_the_runs_own(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rehearsal = ["card.share_base=true", "rollout.engine.adapter_mode=native"]
    assert load_run_config(None, rehearsal).shares_base
    assert not load_run_config(None, [*rehearsal, "cluster.address=auto"]).shares_base
