import ast
import re
import subprocess
import sys
from collections import Counter

import pytest

from envs.datasets.families import (
    DISTRACTORS,
    FAMILIES,
    MAX_WEIGHT_KG,
    MIN_WEIGHT_KG,
    build_catalogue,
    catalogue_passages,
)
from envs.datasets.generated import generate, sample_tasks
from envs.datasets.rows import split_of

ACTIONS = {
    "lookup": "search code answer",
    "two_lookup": "search search code answer",
    "difference": "search search code answer",
    "three_lookup": "search search search code answer",
    "chain": "search search code answer",
}
ITEMS = (*build_catalogue()["train"].items, *build_catalogue()["eval"].items)
WEIGHTS = {item.name: item.weight_kg for item in ITEMS}


def drawn(family, *, split="train", count=300, seed=0):
    return [generate(family, split=split, index=index, seed=seed) for index in range(count)]


def test_weights_of_the_catalogue_are_stable_and_stated_in_passages():
    assert (ITEMS[0].name, ITEMS[0].weight_kg) == ("copper bolts", 75)
    assert len(WEIGHTS) == 32 * 32
    for item in ITEMS:
        assert MIN_WEIGHT_KG <= item.weight_kg <= MAX_WEIGHT_KG
        assert item.passage in catalogue_passages()
        assert not any(item.name in text.lower() for text in DISTRACTORS)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_links_lead_to_items_of_the_same_split(split):
    goods = build_catalogue()[split]
    assert len(goods.items) > 450
    assert len(goods.links) > 100
    assert all(split_of(part.name) == split for part in (*goods.items, *goods.links))
    for link in goods.links:
        assert link.same_as in goods.items
        assert not re.search(r"\d", link.passage)
        assert {link.name in link.passage, link.same_as.name in link.passage} == {True}


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_has_the_steps_of_its_family_and_gives_the_answer(family):
    for generated in drawn(family):
        plan, task = generated.plan, generated.task
        assert " ".join(step.action for step in plan) == ACTIONS[family]
        assert str(eval(plan[-2].action_input)) == task.answer == plan[-1].action_input
        assert re.fullmatch(r"[1-9][0-9]*", task.answer)
        assert len(task.question.split()) <= 35
        assert all(2 <= len(step.thought.split()) <= 6 for step in plan)


@pytest.mark.parametrize("family", ["lookup", "two_lookup", "difference", "three_lookup", "chain"])
def test_code_of_a_lookup_uses_the_weights_that_its_searches_find(family):
    passages = {link.name: link.passage for link in build_catalogue()["train"].links}
    for generated in drawn(family):
        searched = [step.action_input for step in generated.plan if step.action == "search"]
        code, question = generated.plan[-2].action_input, generated.task.question
        assert re.findall(r"\d+", question) == re.findall(r"(\d+)\*", code)
        weights = [int(weight) for weight in re.findall(r"\*(\d+)", code)]
        if family == "chain":
            first, second = searched
            assert (first in question, second in question, second in passages[first]) == (True, False, True)
            assert weights == [WEIGHTS[second]]
        else:
            assert weights == [WEIGHTS[name] for name in searched]
            assert all(name in question for name in searched)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_question_is_in_both_splits(family):
    train = {g.task.question for seed in range(3) for g in drawn(family, count=2000, seed=seed)}
    held_out = {g.task.question for seed in range(3) for g in drawn(family, split="eval", count=2000, seed=seed)}
    assert min(len(train), len(held_out)) > 3000
    assert not train & held_out


def test_another_process_draws_the_same_tasks_and_other_seeds_draw_others():
    program = (
        "from envs.datasets.generated import generate\n"
        f"print([generate(f, split='eval', index=9, seed=4).task.question for f in {list(FAMILIES)}])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = [generate(family, split="eval", index=9, seed=4).task.question for family in FAMILIES]
    assert ast.literal_eval(printed.stdout) == here
    sequences = [{g.task.question for g in drawn("lookup", count=200, seed=seed)} for seed in (0, 1)]
    assert not sequences[0] & sequences[1]


def test_sample_follows_the_mix_and_repeats_no_question():
    mix = {"difference": 1.0, "lookup": 2.0, "chain": 1.0}
    tasks = [generated.task for generated in sample_tasks(mix, split="train", count=1002, seed=0)]
    # The shares are 250.5, 501 and 250.5; the remainder goes to the family named first.
    assert Counter(task.dataset for task in tasks) == {"difference": 251, "lookup": 501, "chain": 250}
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == 1002
    assert {task.dataset for task in tasks[:20]} == set(mix)
    assert tasks == [generated.task for generated in sample_tasks(mix, split="train", count=1002, seed=0)]


def test_family_without_further_questions_is_reported(monkeypatch):
    monkeypatch.setattr("envs.datasets.generated._MAX_DRAWS_PER_TASK", 1)
    with pytest.raises(ValueError, match="chain"):
        sample_tasks({"chain": 1.0}, split="train", count=100, seed=0, purpose="rl")


@pytest.mark.parametrize("mix", [{"chain": -1.0, "lookup": 2.0}, {"chain": 0.0}])
def test_mix_needs_positive_weights(mix):
    with pytest.raises(ValueError, match="positive"):
        sample_tasks(mix, split="train", count=3, seed=0)
