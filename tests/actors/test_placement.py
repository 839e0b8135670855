"""Claims of a run's parts on a cluster, also where they share one card."""

import re

import pytest

from actors import launch
from configs.errors import UserError
from configs.loading import load_run_config

ON_CARDS = ("rollout.engine.device=cuda", "rollout.engine.adapter_mode=native", "learner.device=cuda")


def on_cards(*overrides):
    return load_run_config(None, [*ON_CARDS, *overrides])


@pytest.mark.parametrize(
    ("changes", "room"),
    [("card.shared=true", [{"CPU": 2.0, "GPU": 1.0}]), ("card.learner=0.3", [{"CPU": 1.0, "GPU": 0.3}])],
)
def test_a_shared_card_is_reserved_as_a_whole_and_another_one_by_the_learners_share(changes, room):
    assert launch.learner_room(on_cards(changes)) == room


NOT_SHARED = ("card.shared=false", "learner.device=cpu", "learner.num_workers=2", "rollout.engine.tensor_parallel=2")


@pytest.mark.parametrize("change", NOT_SHARED)
def test_nothing_is_shared_over_several_cards_or_none(change):
    assert not on_cards("card.shared=true", change).shares_card


def test_part_claims_a_core_and_an_engine_over_several_cards_all_of_them_on_one_node():
    config = load_run_config(None, [])
    assert [launch.worker_bundle(config)] == launch.learner_bundles(config) == [{"CPU": 1.0}]
    assert launch.worker_bundle(on_cards("rollout.engine.tensor_parallel=4")) == {"CPU": 1.0, "GPU": 4.0}


def test_no_two_ranks_share_a_card_and_an_engine_fits_beside_one():
    config = on_cards("learner.num_workers=3")
    ranks = launch.learner_bundles(config)
    assert len(ranks) == 3
    assert all(rank["GPU"] > 0.5 for rank in ranks)
    assert ranks[0]["GPU"] + launch.worker_bundle(config)["GPU"] <= 1.0


SHARED_BASE = ("card.shared=true", "card.share_base=true")


def test_the_holder_of_a_shared_base_takes_its_share_from_the_learners():
    both = on_cards(*SHARED_BASE, "card.learner=0.4")
    assert launch.learner_bundles(both) == [{"CPU": 1.0, "GPU": pytest.approx(0.39)}]
    alone = on_cards("card.shared=true", "card.learner=0.4")
    assert launch.learner_bundles(alone) == [{"CPU": 1.0, "GPU": 0.4}]


@pytest.mark.parametrize(
    "changes",
    [*NOT_SHARED, "rollout.engine.adapter_mode=merged", "learner.dtype=float32", "card.learner=0.01"],
)
def test_a_base_that_cannot_be_shared_is_refused_with_the_setting(changes):
    with pytest.raises(UserError, match=re.escape(changes.partition("=")[0].rpartition(".")[2])):
        on_cards(*SHARED_BASE, changes)


def test_on_cpus_a_base_is_shared_only_in_a_cluster_of_the_runs_own(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rehearsal = ["card.share_base=true", "rollout.engine.adapter_mode=native"]
    assert load_run_config(None, rehearsal).shares_base
    assert not load_run_config(None, [*rehearsal, "cluster.address=auto"]).shares_base
