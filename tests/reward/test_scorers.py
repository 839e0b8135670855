import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.datasets import game24
from envs.datasets.families import FAMILIES
from envs.datasets.generated import generate
from envs.types import Task
from reward.scorers import score_aime, score_answer, score_game24, score_integer

ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=300)
EXPRESSION_TEXT = st.text("0123456789+-*/×÷−()= .x^!", max_size=80)


def cases(gold, *texts):
    """Return pairs of a text and its reference."""
    return [(text, gold) for text in texts]


AIME_RIGHT = [
    *cases("204", "204", " 204 ", "204\n", "\t204\r\n", "0204", "000204", "204.0", "0204.0", "$204$", "$ 204 $"),
    *cases("204", "$204.0$", "$$204$$", "\\boxed{204}", "\\boxed{ 204 }", " \\boxed{204} ", "\\boxed{204.0}"),
    *cases("204", "\\boxed{0204}", "$\\boxed{204}$", "$ \\boxed{204} $", "$$\\boxed{204}$$"),
    *cases("073", "73", "073"),
    *cases("73", "073", "\\boxed{073}"),
    *cases("0", "0", "000", "$0$"),
    *cases("000", "0.0"),
    *cases("007", "7"),
    *cases("999", "999"),
]
AIME_WRONG = [
    *cases("204", "", " ", "205", "2 04", "20 4", "100+104", "\\boxed{100+104}", "2^2*51", "408/2", "204, 205"),
    *cases("204", "204 or 205", "204 204", "\\boxed{204}\\boxed{204}", "\\boxed{203} \\boxed{204}", "204 minutes"),
    *cases("204", "204^\\circ", "204°", "204%", "x=204", "x = 204", "The answer is 204", "204.", "204.5", "204.00"),
    *cases("204", "2.04e2", "0xcc", "-204", "+204", "٢٠٤", "２０４", "２04", "²⁰⁴", "204\u200b", "\\boxed{204", "204}"),
    *cases("204", "\\boxed204", "$204", "204$", "$$204$", "$$$204$$$", "\\boxed{\\boxed{204}}", "\\fbox{204}"),
    *cases("204", "{204}", "'204'", "[204]", "two hundred and four", "2_04", "204\x00", "0" * 70 + "204"),
    *cases("204", "204" * 1000),
]


@pytest.mark.parametrize(("text", "gold"), AIME_RIGHT)
def test_aime_accepts(text, gold):
    assert score_aime(text, gold) == 1.0


@pytest.mark.parametrize(("text", "gold"), AIME_WRONG)
def test_aime_rejects(text, gold):
    assert score_aime(text, gold) == 0.0


HAND = (4, 9, 10, 13)  # (10-4)*(13-9) = 6*4
GAME24_RIGHT = [
    *cases(HAND, "(10-4)*(13-9)", "(10 - 4) * (13 - 9)", "(13-9)*(10-4)", "(10-4)×(13-9)", "(10−4)×(13−9)"),
    *cases(HAND, "(10-4)*(13-9) = 24", "(10-4)*(13-9)=24", "(10-4)*(13-9)= 24 ", "  (10-4)*(13-9)\n"),
    *cases(HAND, "(10-4)\n*\t(13-9)", "((10-4)*(13-9))", "((((10-4))))*(13-9)"),
    *cases((10, 4, 9, 13, 2), "(10)-(4)*(9-13)-(2)"),
    *cases((1, 1, 1, 8), "(1+1+1)×8", "8*(1+1+1)", "(1+1+1)*8=24"),
    *cases((1, 3, 4, 6), "6/(1-3/4)", "6÷(1−3÷4)"),
    *cases((3, 3, 8, 8), "8/(3-8/3)", "8÷(3-8÷3) = 24"),
    *cases((1, 5, 5, 5), "5*(5-1/5)"),
    *cases((4, 4, 10, 10), "(10*10-4)/4"),
    *cases((1, 1, 1, 11), "(11+1)*(1+1)"),
    *cases((1, 1, 1, 12), "12*(1+1)*1", "12/1*(1+1)"),
    *cases((1, 1, 4, 6), "4*6*1*1", "1-1+4*6", "4*6/(1*1)"),
    *cases((4, 6, 6, 8), "4+6+6+8"),
    *cases((8, 6, 4, 6, 2), "8-6+4*6-2"),
    *cases((2, 4, 13, 13), "13+13-4/2"),
    *cases((1, 3, 3, 7), "(3*7+3/1)"),
]
GAME24_WRONG = [
    *cases(HAND, "", "24", "= 24", "4+9+10+13", "(10-4)*(13-9) = 25", "(10-4)*(13-9) = 24 = 24"),
    *cases(HAND, "24 = (10-4)*(13-9)", "(10-4)*(13-9)*1", "(10-4)*4", "(10-4)*(13-9)+4-4"),
    *cases(HAND, "The answer is (10-4)*(13-9)", "(10-4)*(13-9).", "10-4*13-9", "(10-4)(13-9)", "(10-4)x(13-9)"),
    *cases(HAND, "(10-4)**(13-9)", "(10-4)*(13-9", "10-4)*(13-9)", "()(10-4)*(13-9)", "[10-4]*[13-9]"),
    *cases(HAND, "(10-4)*(13-9);import os", "__import__('os')", "(１０-4)*(13-9)", "(1 0-4)*(13-9)", "(010-4)*(13-9)"),
    *cases(HAND, "(10.0-4)*(13-9)", "9" * 199),
    *cases((1, 1, 1, 12), "1(1+1)*12"),
    *cases((1, 1, 2, 12), "12*1+12"),
    *cases((1, 1, 1, 3), "11+13"),
    *cases((1, 1, 13), "1 1+13"),
    *cases((1, 1, 1, 4), "4!*1*1*1"),
    *cases((1, 1, 1, 1), "(1+1+1+1)!"),
    *cases((1, 1, 2, 5), "5^2-1*1", "5²-1*1"),
    *cases((1, 1, 4, 6), "-1+1+4*6", "+4*6*1*1", "4*6--1-1", "4*6+0*(1-1)", "4*6*1*1e0", "4*6\x00*1*1", "4·6·1·1"),
    *cases((1, 1, 4, 6), "(" * 90 + "4*6*1*1" + ")" * 90, "4*6*1*1" + " " * 300),
    *cases((1, 2, 4, 6), "4*-6*(1-2)"),
    *cases((1, 1, 24), "24/(1-1)"),
    *cases((1, 1, 1, 4, 6), "4*6+1//1-1"),
    *cases((2, 49), "49//2"),
    *cases((4, 7, 8), "7%4*8"),
    *cases((3, 8), "8*3.0000000001"),
]


@pytest.mark.parametrize(("text", "numbers"), GAME24_RIGHT)
def test_game24_accepts(text, numbers):
    assert score_game24(text, numbers) == 1.0


@pytest.mark.parametrize(("text", "numbers"), GAME24_WRONG)
def test_game24_refuses(text, numbers):
    assert score_game24(text, numbers) == 0.0


def test_every_solution_of_the_solver_scores():
    tasks = game24.generate_game24(split="train", count=150, seed=0)
    for task in tasks:
        assert score_answer(task, game24.solve([int(n) for n in task.answer.split()])) == 1.0


@pytest.mark.parametrize("text", ["1888", " 1888\n", "+1888", "01888", "1,888", "+1,888", "\t1888", "1888 "])
def test_integer_accepts(text):
    assert score_integer(text, "1888") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1889",
        "-1888",
        "--1888",
        "+-1888",
        "1888.0",
        "1888.",
        "1 888",
        "18,88",
        "1,8,8,8",
        "1888,",
        ",1888",
        "1,888,",
        "1_888",
        "1888 kg",
        "37*48+112",
        "1888 or 1889",
        "x = 1888",
        "$1888$",
        "\\boxed{1888}",
        "1.888e3",
        "0x760",
        "１８８８",
        "١٨٨٨",
        "−1888",
        "None",
        "1888" * 100,
    ],
)
def test_integer_refuses(text):
    assert score_integer(text, "1888") == 0.0


def test_integer_compares_signs():
    assert score_integer("-60", "-60") == 1.0
    assert score_integer("60", "-60") == 0.0
    assert score_integer("-0", "0") == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_generated_task_is_scored_by_its_own_answer(family):
    task = generate(family, split="train", index=0, seed=0).task
    assert score_answer(task, task.answer) == 1.0
    assert score_answer(task, str(int(task.answer) + 1)) == 0.0


def test_an_unknown_data_set_is_refused_even_without_an_answer():
    task = Task(id="t", dataset="gsm8k", question="?", answer="1")
    with pytest.raises(ValueError):
        score_answer(task, None)


@pytest.mark.parametrize(("scorer", "gold"), [(score_aime, "080 or 081"), (score_aime, ""), (score_integer, "x")])
def test_a_malformed_reference_is_an_error_and_not_a_zero(scorer, gold):
    with pytest.raises(ValueError):
        scorer("80", gold)


@given(ANY_TEXT | EXPRESSION_TEXT)
def test_no_text_makes_a_scorer_raise(text):
    assert score_aime(text, "204") in (0.0, 1.0)
    assert score_integer(text, "204") in (0.0, 1.0)
    assert score_game24(text, (1, 1, 1, 8)) in (0.0, 1.0)


def render(tree) -> str:
    return str(tree) if isinstance(tree, int) else f"({render(tree[0])}{tree[1]}{render(tree[2])})"


def exact_value(tree) -> Fraction:
    if isinstance(tree, int):
        return Fraction(tree)
    left, sign, right = exact_value(tree[0]), tree[1], exact_value(tree[2])
    return {"+": left + right, "-": left - right, "*": left * right}[sign] if sign != "/" else left / right


def leaves(tree) -> list[int]:
    return [tree] if isinstance(tree, int) else leaves(tree[0]) + leaves(tree[2])


TREES = st.recursive(
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    lambda trees: st.tuples(trees, st.sampled_from("+-*/"), trees),
    max_leaves=5,
)


@given(TREES)
def test_game24_accepts_exactly_the_expressions_worth_24(tree):
    try:
        worth_24 = exact_value(tree) == 24
    except ZeroDivisionError:
        worth_24 = False
    assert score_game24(render(tree), leaves(tree)) == float(worth_24)
    assert score_game24(render(tree), [*leaves(tree), 1]) == 0.0


@given(st.integers(0, 999), st.integers(0, 999))
def test_aime_accepts_exactly_the_right_integer(answer, gold):
    assert score_aime(f"\\boxed{{{answer:03d}}}", str(gold)) == float(answer == gold)


@given(st.integers(-(10**9), 10**9))
def test_integer_accepts_plain_and_grouped_digits(number):
    assert score_integer(str(number), str(number)) == 1.0
    assert score_integer(f"{number:,}", str(number)) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1_000_000,
        "1+" * 1_000_000,
        "$" * 1_000_000,
        " " * 1_000_000,
        "9" * 1_000_000,
        "\\boxed{" * 200_000,
    ],
)
def test_hostile_texts_take_no_time(text):
    started = time.process_time()
    for candidate in (text, text[:200], text[:64]):
        assert score_aime(candidate, "204") == 0.0
        assert score_integer(candidate, "204") == 0.0
        assert score_game24(candidate, (1, 1, 1, 8)) == 0.0
    assert time.process_time() - started < 1
