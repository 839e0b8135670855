import re

import pytest

from envs.datasets.families import MAX_WEIGHT_KG, MIN_WEIGHT_KG, build_catalogue
from envs.datasets.split import split_of


def test_the_catalogue_has_about_a_thousand_differently_named_items():
    catalogue = build_catalogue()
    names = [item.name for item in (*catalogue.train.items, *catalogue.eval.items)]
    assert len(names) == len(set(names)) == 32 * 32
    assert all(re.fullmatch(r"[a-z]+ [a-z]+", name) for name in names)


def test_the_halves_share_no_item_and_are_about_equal():
    catalogue = build_catalogue()
    train = {item.name for item in catalogue.train.items}
    held_out = {item.name for item in catalogue.eval.items}
    assert not train & held_out
    assert min(len(train), len(held_out)) > 450


def test_weights_do_not_change_between_releases():
    # Recorded runs and cold-start checkpoints were made with these weights.
    first = build_catalogue().train.items[0]
    assert (first.name, first.weight_kg) == ("copper bolts", 75)


def test_weights_have_two_digits_and_a_passage_states_them():
    catalogue = build_catalogue()
    for item in (*catalogue.train.items, *catalogue.eval.items):
        assert MIN_WEIGHT_KG <= item.weight_kg <= MAX_WEIGHT_KG
        assert item.passage == f"One crate of {item.name} weighs {item.weight_kg} kg."
        assert item.passage in catalogue.passages


def test_distractors_name_no_item():
    catalogue = build_catalogue()
    assert len(catalogue.distractors) >= 5
    names = [item.name for item in (*catalogue.train.items, *catalogue.eval.items)]
    assert not [name for name in names if any(name in text.lower() for text in catalogue.distractors)]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_goods_of_a_split_are_its_half(split):
    goods = build_catalogue().goods_of(split)
    assert goods is getattr(build_catalogue(), split)
    assert all(split_of(one.name) == split for one in (*goods.items, *goods.links))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_link_states_no_weight_and_leads_to_an_item_of_its_own_half(split):
    goods = build_catalogue().goods_of(split)
    assert len(goods.links) > 100
    for link in goods.links:
        assert link.item in goods.items
        assert not re.search(r"\d", link.passage)
        assert link.name in link.passage
        assert link.item.name in link.passage
