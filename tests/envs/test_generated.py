import ast
import random
import re
import subprocess
import sys
from collections import Counter
from statistics import fmean

import pytest

from envs.datasets.families import FAMILIES, build_catalogue
from envs.datasets.generated import generate, sample_tasks, wrong_plan
from envs.datasets.registry import load_tasks

FAMILY_NAMES = ("arith", "lookup", "two_lookup", "three_lookup", "chain", "branch")
WEIGHTS = {item.name: item.weight_kg for item in (*build_catalogue().train.items, *build_catalogue().eval.items)}


def drawn(family, *, split="train", count=300, seed=0):
    return [generate(family, split=split, index=index, seed=seed) for index in range(count)]


def code_results(plan):
    """What a persistent interpreter prints for each code step of a plan."""
    names, results = {}, []
    for step in plan:
        if step.action == "code":
            *statements, last = ast.parse(step.action_input).body
            exec(compile(ast.Module(statements, []), "plan", "exec"), names)
            results.append(eval(compile(ast.Expression(last.value), "plan", "eval"), names))
    return results


def test_the_families_are_the_six_known_ones():
    assert tuple(FAMILIES) == FAMILY_NAMES


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_running_the_plan_gives_the_answer(family):
    for generated in drawn(family):
        assert str(code_results(generated.plan)[-1]) == generated.task.answer
        assert generated.plan[-1].action == "answer"
        assert generated.plan[-1].action_input == generated.task.answer


@pytest.mark.parametrize(
    ("family", "actions"),
    [
        ("arith", ["code", "answer"]),
        ("lookup", ["search", "code", "answer"]),
        ("two_lookup", ["search", "search", "code", "answer"]),
        ("three_lookup", ["search", "search", "search", "code", "answer"]),
        ("chain", ["search", "search", "code", "answer"]),
        ("branch", ["code", "code", "answer"]),
    ],
)
def test_every_plan_of_a_family_takes_the_same_actions(family, actions):
    assert all([step.action for step in generated.plan] == actions for generated in drawn(family))


@pytest.mark.parametrize("family", ["lookup", "two_lookup", "three_lookup"])
def test_the_code_of_a_lookup_uses_the_weights_that_its_searches_find(family):
    for generated in drawn(family):
        searched = [step.action_input for step in generated.plan if step.action == "search"]
        code = generated.plan[-2].action_input
        assert [int(weight) for weight in re.findall(r"\*(\d+)", code)] == [WEIGHTS[n] for n in searched]
        assert all(name in generated.task.question for name in searched)


def test_only_what_a_chain_finds_first_tells_what_it_searches_next():
    passages = {link.name: link.passage for link in build_catalogue().train.links}
    for generated in drawn("chain"):
        first, second, code, _ = (step.action_input for step in generated.plan)
        assert first in generated.task.question
        assert second not in generated.task.question
        assert second in passages[first]
        assert code.endswith(f"*{WEIGHTS[second]}")


@pytest.mark.parametrize("family", ["lookup", "two_lookup", "three_lookup", "chain"])
def test_a_lookup_question_states_the_counts_and_nothing_else(family):
    for generated in drawn(family):
        counts = re.findall(r"(\d+)\*", generated.plan[-2].action_input)
        assert re.findall(r"\d+", generated.task.question) == counts


def test_the_first_result_of_a_branch_decides_the_second_call():
    conditions = {
        "even": lambda x: x % 2 == 0,
        "odd": lambda x: x % 2 == 1,
        "above": lambda x, bound: x > bound,
        "below": lambda x, bound: x < bound,
    }
    for generated in drawn("branch"):
        x = code_results(generated.plan)[0]
        word, bound = re.search(r"\b(even|odd|above|below)(?: (\d+))?", generated.task.question).groups()
        met = conditions[word](x, *([int(bound)] if bound else []))
        then, other = re.findall(r"x [-+*] \d+", generated.task.question)
        assert generated.plan[1].action_input == (then if met else other)


def test_both_branches_are_taken_about_equally_often():
    taken = Counter("not" in generated.plan[1].thought for generated in drawn("branch", count=1000))
    assert 400 < taken[True] < 600


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_questions_and_thoughts_are_short_and_answers_positive_integers(family):
    for generated in drawn(family):
        assert len(generated.task.question.split()) <= 35
        assert all(2 <= len(step.thought.split()) <= 6 for step in generated.plan)
        assert re.fullmatch(r"[1-9][0-9]*", generated.task.answer)
        assert generated.task.dataset == family


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_no_question_occurs_in_both_splits(family):
    train = {g.task.question for seed in range(3) for g in drawn(family, count=2000, seed=seed)}
    held_out = {g.task.question for seed in range(3) for g in drawn(family, split="eval", count=2000, seed=seed)}
    assert min(len(train), len(held_out)) > 3000
    assert not train & held_out


def test_one_computation_in_two_wordings_stays_in_one_split():
    def computations(split):
        plans = [generated.plan for generated in drawn("arith", split=split, count=4000)]
        return {
            (re.sub(r"\d+", "n", code), tuple(sorted(re.findall(r"\d+", code)[:2])), code.split("*")[-1])
            for code in (plan[0].action_input for plan in plans)
        }

    assert not computations("train") & computations("eval")


def test_no_item_is_searched_in_both_splits():
    def searched(split):
        plans = [g.plan for g in drawn("two_lookup", split=split, count=2000)]
        return {step.action_input for plan in plans for step in plan if step.action == "search"}

    assert len(searched("train")) > 400
    assert not searched("train") & searched("eval")


def test_the_same_arguments_give_the_same_task_and_any_other_argument_another():
    first = generate("arith", split="train", index=3, seed=5)
    assert generate("arith", split="train", index=3, seed=5) == first
    others = [
        generate("arith", split="eval", index=3, seed=5),
        generate("arith", split="train", index=5, seed=3),
        generate("arith", split="train", index=2, seed=6),
    ]
    assert first.task.question not in [other.task.question for other in others]


def test_neighbouring_seeds_do_not_repeat_each_other_shifted():
    sequences = [[g.task.question for g in drawn("arith", count=200, seed=seed)] for seed in (0, 1)]
    assert not set(sequences[0]) & set(sequences[1])


def test_another_process_draws_the_same_tasks():
    program = (
        "from envs.datasets.generated import generate\n"
        f"print([generate(f, split='eval', index=9, seed=4).task.question for f in {FAMILY_NAMES}])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    here = [generate(family, split="eval", index=9, seed=4).task.question for family in FAMILY_NAMES]
    assert ast.literal_eval(printed.stdout) == here


def test_a_sample_follows_the_mix_and_repeats_no_question():
    mix = {"arith": 1.0, "lookup": 2.0, "branch": 1.0}
    tasks = [generated.task for generated in sample_tasks(mix, split="train", count=1002, seed=0)]
    # 250.5, 501, 250.5: the half that is left over goes to the family named first.
    assert Counter(task.dataset for task in tasks) == {"arith": 251, "lookup": 501, "branch": 250}
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == 1002
    assert {task.dataset for task in tasks[:20]} == set(mix)


def test_a_sample_is_deterministic():
    samples = [sample_tasks({"arith": 1, "lookup": 1}, split="eval", count=50, seed=s) for s in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


def test_a_family_that_runs_out_of_questions_says_so():
    from envs.datasets.generated import _distinct

    seen = {generate("arith", split="train", index=index, seed=0).task.question for index in range(50)}
    with pytest.raises(ValueError, match="1 train tasks of 'arith' were asked for, it has 0"):
        list(_distinct("arith", split="train", count=1, seed=0, purpose=None, seen=seen))


@pytest.mark.parametrize("mix", [{"arith": -1.0, "lookup": 2.0}, {"arith": 0.0}])
def test_a_mix_needs_positive_weights(mix):
    with pytest.raises(ValueError, match="positive sum"):
        sample_tasks(mix, split="train", count=3, seed=0)


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown family 'algebra'; known families: arith, lookup"):
        generate("algebra", split="train", index=0, seed=0)
    with pytest.raises(ValueError, match="unknown split 'test'; known splits: train, eval"):
        generate("arith", split="test", index=0, seed=0)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_wrong_plan_ends_in_a_wrong_answer_that_its_own_steps_support(family):
    rng = random.Random(0)
    for generated in drawn(family, count=1000):
        wrong = wrong_plan(generated.plan, rng)
        assert wrong[-1].action == "answer"
        assert wrong[-1].action_input != generated.task.answer
        if len(wrong) > 1 and wrong[-2].action == "code":
            assert wrong[-1].action_input == str(code_results(wrong)[-1])


@pytest.mark.parametrize(
    ("family", "wrong_turns"),
    [
        ("arith", {"answer", "code answer"}),
        ("lookup", {"answer", "code answer", "search answer", "search code answer"}),
        ("two_lookup", {"answer", "search code answer", "search search code answer"}),
        (
            "three_lookup",
            {"answer", "search code answer", "search search code answer", "search search search code answer"},
        ),
        ("chain", {"answer", "search search answer", "search code answer", "search search code answer"}),
        ("branch", {"answer", "code answer", "code code answer"}),
    ],
)
def test_wrong_plans_guess_forget_a_search_stop_early_or_compute_wrongly(family, wrong_turns):
    rng = random.Random(0)
    plans = [wrong_plan(generated.plan, rng) for generated in drawn(family, count=200)]
    assert {" ".join(step.action for step in plan) for plan in plans} == wrong_turns


def test_most_wrong_plans_for_a_difference_and_none_for_a_sum_subtract_after_one_search():
    """So that a policy that learns from them tries to subtract at all."""
    rng = random.Random(0)
    subtract = {"-": [], "+": []}
    for generated in drawn("two_lookup", count=1000):
        wrong = wrong_plan(generated.plan, rng)
        one_search = [step.action for step in wrong] == ["search", "code", "answer"]
        sign = "-" if "-" in generated.plan[-2].action_input else "+"
        subtract[sign].append(one_search and "-" in wrong[1].action_input)
    assert 0.85 < fmean(subtract["-"]) < 0.95
    assert not any(subtract["+"])


def test_a_wrong_plan_is_deterministic_in_its_generator():
    generated = generate("two_lookup", split="train", index=0, seed=0)
    assert wrong_plan(generated.plan, random.Random(3)) == wrong_plan(generated.plan, random.Random(3))


def test_the_registry_gives_the_sampled_tasks_of_a_family():
    tasks = load_tasks("lookup", split="eval", count=20, seed=3)
    assert tasks == [g.task for g in sample_tasks({"lookup": 1.0}, split="eval", count=20, seed=3)]


def test_the_registry_names_the_known_data_sets():
    known = "arith, lookup, two_lookup, three_lookup, chain, branch, game24, nlile/24-game, aime"
    with pytest.raises(ValueError, match=f"unknown data set 'gsm8k'; known data sets: {known}"):
        load_tasks("gsm8k", split="train", count=1, seed=0)


def test_a_generated_family_reads_no_file():
    with pytest.raises(ValueError, match="reads no file"):
        load_tasks("arith", split="train", count=1, seed=0, path="tasks.jsonl")
