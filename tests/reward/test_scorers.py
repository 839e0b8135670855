"""The scorers: tables of right and wrong answers, properties, and hostile texts."""

import re
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.datasets.families import FAMILIES
from envs.datasets.generated import generate
from envs.types import Task
from reward.scorers import partial_credit, score_answer, score_integer
from reward.scorers.math import MAX_MEMORY, is_solution, same_value, score_math
from reward.scorers.process import _CHILDREN, ScoringError
from reward.scorers.text import exact_match, score_choice, score_gaia, token_f1

ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=300)
EXPRESSION_TEXT = st.text("0123456789+-*/×÷−()= .x^!", max_size=80)
MATH_TEXT = st.text("0123()[]{}+-/$ .,\\sqrtfracpi", max_size=20)
CHOICE = "C. Colorectal cancer"
HAND = (4, 9, 10, 13)  # (10-4)*(13-9) = 6*4


def cases(gold, *texts):
    """Return pairs of a text and its reference."""
    return [(text, gold) for text in texts]


SHORT_RIGHT = [
    *cases("james madison", "James Madison", "  the James  Madison. "),
    *cases("Let'S Make Money", "Let's Make Money", "Let’s Make Money"),
    *cases("United States\nUSA\nU.S.", "USA", "us"),
]
SHORT_RIGHT += [("“Archibald, certainly not!”", '"Archibald, certainly not!"'), ("323-272 BC", "323–272 BC")]
SHORT_RIGHT += [("Gülçiçek Hatun", "Gu\u0308lc\u0327ic\u0327ek Hatun"), ("138535", "138,535"), ("A yes", "yes")]
SHORT_RIGHT += [("35.", "35"), ("$1,250.5", "1250.5"), ("−5 °C", "-5 °C")]
SHORT_RIGHT += [("Apollo-11", "Apollo 11".replace(" ", "")), ("(1,2)", "(1, 2)")]
SHORT_RIGHT += [("3,-4 and 1,000", "3, -4 and 1000"), ("1914-1918", "1914 – 1918"), ("Hepatitis A.", "hepatitis a")]
SHORT_WRONG = [
    *cases("yes", "", "yes and no", "yes " * 400),
    *cases("james madison", "president James Madison", "James", "madison james"),
    *cases("United States\nUSA", "United States USA", "United States\nUSA"),
]
SHORT_WRONG += [("35", "3.5"), ("5", ".5"), ("5", "-5"), ("−5", "5"), ("12.5 million", "125 million"), ("34", "3/4")]
SHORT_WRONG += [("123", "1,2,3"), ("11/2/2020", "1/12/2020"), ("hepatitis", "Hepatitis A"), ("B", "A, B")]
SHORT_WRONG += [("Gulcicek Hatun", "Gülçiçek Hatun")]
CHOICE_RIGHT = [
    *cases(
        CHOICE, "C", "c", " C. ", "(C)", "(c).", "C)", "$C$", "\\boxed{C}", "$\\boxed{C}$", "\\boxed{\\text{C}}", "C:"
    ),
    *cases(CHOICE, "C. Colorectal cancer", "C) colorectal cancer.", "(C) Colorectal  cancer", "Colorectal cancer"),
    *cases("A. .", "A", "."),
]
CHOICE_WRONG = [
    *cases(
        CHOICE, "", "D", "CC", "C D", "C, D", "C or D", "A. Colorectal cancer", "C. Oral ulcers", "C. cancer", "cancer"
    ),
    *cases(CHOICE, "The answer is C", "not C", "\\boxed{C", "$C", "С", "C" * 700, "C\nD", "1", "ABCD"),
    *cases(CHOICE, "(C) Colorectal cancer (D) Oral ulcers"),
    *cases("A. .", "", "..."),
]
GAIA_RIGHT = [
    *cases("17", "17", "17.0"),
    *cases("b,e", "b, e", "b; e"),
]
GAIA_RIGHT += [("$1,700", "1700"), ("35%", "35"), ("1e3", "1000"), ("Right", "right")]
GAIA_RIGHT += [("St. Petersburg", "Saint Petersburg".replace("Saint", "St")), ("seagull", "sea gull")]
GAIA_RIGHT += [("3, 4.0, 5", "3,4,5"), ("+", "+")]
GAIA_WRONG = [
    *cases("17", "", "18", "17 apples", "1_7", "inf", "nan"),
    *cases("b,e", "b, e, f", "e, b", "b"),
    *cases("3,4,5", "3, 4, 6"),
    *cases("right", "Left", "x" * 1001),
    *cases("+", "", "-", "++"),
]
MATH_RIGHT = [
    *cases("27", "27", "27.0", " $27$ ", "$\\boxed{27}$", "\\(27\\)", "\\[\n\\boxed{27}\n\\]"),
    *cases("27", "\\(\\left(30-3\\right)\\)", "\\boxed{027}", "54/2", "\\frac{54}{2}", "\\dfrac{54}{2}", "3^3"),
    *cases("27", "3**3", "\\sqrt{729}", "sqrt(729)", "\\sqrt[3]{19683}", "3\\sqrt{81}", "27\\pi/\\pi"),
    *cases("27", "3 \\cdot 9", "3×9", "\\left(30-3\\right)", "27 miles", "27^\\circ", "x=27", "27 = 27"),
    *cases("-1", "−1", "(-1)^3"),
    *cases("1/2", "0.5", "2-1\\frac{1}{2}", "\\frac12"),
    *cases("1", "(-1)^{2024}", "1^{999999999}"),
    *cases("9/5", "1\\frac{4}{5}", "1\\frac45"),
    *cases("(1, 2)", "(1,2)", "\\left(1, \\frac{4}{2}\\right)"),
    *cases("\\{1, 2\\}", "\\{2, 1\\}", "1, 2", "2, 1"),
    *cases("x^2+1", "1 + x^2", "x**2 + 1", "y = x^2 + 1"),
    *cases("(-\\infty, 2]", "(-∞, 2]"),
    *cases("x \\le 2", "(-\\infty, 2]"),
    *cases("\\pm 2", "2, -2"),
    *cases("2\\sqrt{3}", "√12", "2√3", "\\sqrt{12}"),
    *cases("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
    *cases("\\begin{pmatrix} -18 \\\\ -49 \\end{pmatrix}", "\\begin{pmatrix}-18\\\\-49\\end{pmatrix}"),
    *cases("\\frac{\\sqrt{3}\\pi}{2}", "sqrt(3)*pi/2", "\\sqrt{3}pi/2"),
    *cases("\\ln 2", "ln(2)"),
    *cases("e^2\\sin x", "exp(2)*sin(x)", "e**2 sin(x)"),
    *cases("yes", "Yes", "\\text{Yes}", "**yes**"),
]
MATH_RIGHT += [("27", "\\( \\frac{54}{2} \\)"), ("3,159", "3159"), ("\\sqrt{8}", "2\\sqrt{2}")]
MATH_RIGHT += [("2^{100}", "1267650600228229401496703205376"), ("10^{-3}", "1/1000"), ("5!", "120")]
MATH_RIGHT += [("\\sqrt[3]{2^{99}}", "8589934592"), ("1.8", "1\\frac{4}{5}"), ("$1 \\dfrac{4}{5}$", "\\frac{9}{5}")]
MATH_RIGHT += [("-1\\tfrac{4}{5}", "-9/5"), ("\\boxed{1,000\\frac{1}{2}}", "1000.5"), ("0\\frac{0}{5}", "0")]
MATH_RIGHT += [("2\\cdot 1\\frac{1}{2}", "3"), ("3\\frac{\\sqrt{2}}{2}", "3\\sqrt{2}/2"), ("-1 1/4", "-5/4")]
MATH_RIGHT += [("\\sqrt3\\frac{1}{2}", "\\sqrt{3}/2"), ("$-\\dfrac 34$", "-3/4"), ("\\frac1{72}", "1/72")]
MATH_RIGHT += [("\\frac{13}2", "6.5"), ("0.1\\overline{6}", "1/6"), ("10⁻³", "0.001"), ("5²⁄₃", "17/3")]
MATH_WRONG = [
    *cases("27", "\\(27\\) \\(27\\)", "\\(27\\]", "\\(27", "\\[1\\]+\\[26\\]", "", "28", "27 or 28", "27, 28"),
    *cases("27", "\\boxed{27}\\boxed{28}", "2 7", "1/0", "0/0", "26.999999999", "\\boxed{27", "27!"),
    *cases("27", "__import__('os')", "(" * 50 + "27" + ")" * 50, "9" * 201, "\\frac{54}", "\\sqrt", "x=28", "(27)(27)"),
    *cases("1", "\\frac1", "\\frac{1"),
    *cases("(1, 2)", "(2, 1)", "[1, 2]", "(1, 2, 3)", "(1, 2"),
    *cases("\\{1, 2\\}", "\\{1\\}", "\\{1, 2, 3\\}"),
    *cases("x^2+1", "x^2", "x^2-1", "z^2+1"),
    *cases("(-\\infty, 2]", "(-\\infty, 2)", "(-\\infty, 3]"),
    *cases("yes", "no", "sey", "yes or no"),
    *cases("Paris", "Pairs"),
    *cases("\\begin{pmatrix} 3 \\\\ -1 \\end{pmatrix}", "\\begin{pmatrix} 4 \\\\ -2 \\end{pmatrix}", "2"),
    *cases("-18 \\\\ -49 \\\\ 96", "-49 \\\\ -18 \\\\ 96"),
    *cases("2\\pi", "3*pi", "2"),
]
MATH_WRONG += [("4/5", "1\\frac{4}{5}"), ("1\\frac{4}{5}", "4/5"), ("-1\\frac{4}{5}", "-1/5"), ("\\pm 2", "2")]
MATH_WRONG += [("-1\\frac{4}{5}", "-4/5"), ("1\\frac{4}", "9/5"), ("\\frac12", "12"), ("0.866", "\\frac{\\sqrt{3}}{2}")]
GAME24_RIGHT = [
    *cases(HAND, "(10-4)*(13-9)", "(10 - 4) * (13 - 9)", "(13-9)*(10-4)", "(10-4)×(13-9)", "(10−4)×(13−9)"),
    *cases(HAND, "(10-4)*(13-9) = 24", "(10-4)*(13-9)=24", "(10-4)*(13-9)= 24 ", "  (10-4)*(13-9)\n"),
    *cases(HAND, "(10-4)\n*\t(13-9)", "((10-4)*(13-9))", "((((10-4))))*(13-9)"),
    *cases((1, 1, 1, 8), "(1+1+1)×8", "8*(1+1+1)", "(1+1+1)*8=24"),
    *cases((1, 3, 4, 6), "6/(1-3/4)", "6÷(1−3÷4)"),
    *cases((3, 3, 8, 8), "8/(3-8/3)", "8÷(3-8÷3) = 24"),
    *cases((1, 1, 1, 12), "12*(1+1)*1", "12/1*(1+1)"),
    *cases((1, 1, 4, 6), "4*6*1*1", "1-1+4*6", "4*6/(1*1)"),
]
GAME24_RIGHT += [("(10)-(4)*(9-13)-(2)", (10, 4, 9, 13, 2)), ("5*(5-1/5)", (1, 5, 5, 5))]
GAME24_RIGHT += [("8-6+4*6-2", (8, 6, 4, 6, 2)), ("13+13-4/2", (2, 4, 13, 13))]
GAME24_WRONG = [
    *cases(HAND, "", "24", "= 24", "4+9+10+13", "(10-4)*(13-9) = 25", "(10-4)*(13-9) = 24 = 24"),
    *cases(HAND, "24 = (10-4)*(13-9)", "(10-4)*(13-9)*1", "(10-4)*4", "(10-4)*(13-9)+4-4"),
    *cases(HAND, "The answer is (10-4)*(13-9)", "(10-4)*(13-9).", "10-4*13-9", "(10-4)(13-9)", "(10-4)x(13-9)"),
    *cases(HAND, "(10-4)**(13-9)", "(10-4)*(13-9", "10-4)*(13-9)", "()(10-4)*(13-9)", "[10-4]*[13-9]"),
    *cases(HAND, "(10-4)*(13-9);import os", "__import__('os')", "(1 0-4)*(13-9)", "(010-4)*(13-9)"),
    *cases(HAND, "(10.0-4)*(13-9)", "9" * 199),
    *cases((1, 1, 2, 5), "5^2-1*1", "5²-1*1"),
    *cases((1, 1, 4, 6), "-1+1+4*6", "+4*6*1*1", "4*6--1-1", "4*6+0*(1-1)", "4*6*1*1e0", "4*6\x00*1*1"),
    *cases((1, 1, 4, 6), "(" * 90 + "4*6*1*1" + ")" * 90, "4*6*1*1" + " " * 300),
]
GAME24_WRONG += [("12*1+12", (1, 1, 2, 12)), ("4!*1*1*1", (1, 1, 1, 4)), ("4*-6*(1-2)", (1, 2, 4, 6))]
GAME24_WRONG += [("24/(1-1)", (1, 1, 24)), ("4*6+1//1-1", (1, 1, 1, 4, 6)), ("49//2", (2, 49)), ("7%4*8", (4, 7, 8))]
GAME24_WRONG += [("8*3.0000000001", (3, 8))]
INTEGER_RIGHT = [
    *cases("204", "204", "\t204\r\n", "000204", "+204", "204.", "204.00", "2.04e2", "$ 204 $", "$$204$$"),
    *cases("204", " \\boxed{ 204.0 } ", "$$\\boxed{0204}$$", "\\boxed{\\boxed{204}}", "٢٠٤", "２04", "204\u200b"),
    *cases("1888", "1,888", "+1,888", "$1888$", "1888.0", "1.888e3", "１８８８"),
    *cases("-60", "-60", "−60"),
    *cases("0", "-0", "000", "$0$"),
    *cases("000", "0.0"),
    *cases("073", "73", "073"),
]
INTEGER_WRONG = [
    *cases("204", "", " ", "205", "2 04", "100+104", "\\boxed{100+104}", "2^2*51", "408/2", "204, 205", "204 or 205"),
    *cases("204", "204 204", "\\boxed{204}\\boxed{204}", "\\boxed{203} \\boxed{204}", "204 minutes", "204^\\circ"),
    *cases("204", "204°", "204%", "x=204", "The answer is 204", "204.5", "0xcc", "-204", "²⁰⁴", "\\boxed{204", "204}"),
    *cases("204", "\\boxed204", "204$", "$$204$", "$$$204$$$", "\\fbox{204}", "{204}", "'204'", "[204]", "2_04"),
    *cases("204", "two hundred and four", "None", "204\x00", "0" * 70 + "204", "204" * 1000),
    *cases(
        "1888", "1889", "-1888", "−1888", "--1888", "+-1888", "1 888", "18,88", "1,8,8,8", "1888,", ",1888", "1,888,"
    ),
    *cases("-60", "60"),
]
GAME24_RIGHT += [*cases(HAND, "(１０−4)·(13-9)", "$(10-4)\\times(13-9)$"), ("4·6·1·1", (1, 1, 4, 6))]
CHOICE_RIGHT += cases(
    CHOICE, "Ｃ", "**C**", "option c", "Answer: C", "[C]", "$\\textbf{(C)}$", "**C.** colorectal cancer"
)
CHOICE_WRONG += cases(CHOICE, "option d", "**D**", "[C, D]", "**D.** Colorectal cancer", "\\text{C}\\text{D}")
SHORT_WRONG += [("5²", "52"), ("5²", "5/2"), ("1½", "11/2"), ("1,2,300", "1, 2300"), ("H₁₀", "H1 0"), ("10₂", "102")]
SHORT_WRONG += [("5%", "5"), ("5 %", "5"), ("5!", "5"), ("<5", ">5"), ("1_000", "1000"), ("5‰", "5"), ("3·4", "34")]
SHORT_RIGHT += [
    ("巴黎。", "巴黎"),
    ("¿Qué?", "qué"),
    ("m²", "m^2"),
    ("H₂O", "h2o"),
    ("10⁻³", "10^{-3}"),
    ("5\\%", "5 %"),
]
GAIA_WRONG += [("35 kg", "3.5 kg"), ("5 °C", "-5 °C"), ("3,5", "35"), ("12", "1/2"), ("3 4", "34 "), ("50", "50%")]
GAIA_RIGHT += [("50%", "50%"), ("3, 50%", "3,50%"), ("3、4", "3, 4"), ("1/2", "½")]
MATH_WRONG += [("0.(3)", "1/3"), ("0,123", "123"), ("10₂", "102"), ("10+5%", "0.15"), ("\\$45\\$46", "45")]
MATH_WRONG += [("2 1 1/4", "2.5"), ("**2**3**", "8")]
RIGHT = {
    exact_match: SHORT_RIGHT,
    token_f1: SHORT_RIGHT,
    score_choice: CHOICE_RIGHT,
    score_gaia: GAIA_RIGHT,
    score_math: MATH_RIGHT,
    is_solution: GAME24_RIGHT,
    score_integer: INTEGER_RIGHT,
}
WRONG = {
    exact_match: SHORT_WRONG,
    score_choice: CHOICE_WRONG,
    score_gaia: GAIA_WRONG,
    score_math: MATH_WRONG,
    is_solution: GAME24_WRONG,
    score_integer: INTEGER_WRONG,
}


@pytest.mark.parametrize("scorer", RIGHT, ids=lambda scorer: scorer.__name__)
def test_right_answers_score_one(scorer):
    assert [case for case in RIGHT[scorer] if scorer(*case) != 1.0] == []


@pytest.mark.parametrize("scorer", WRONG, ids=lambda scorer: scorer.__name__)
def test_wrong_answers_score_zero(scorer):
    assert [case for case in WRONG[scorer] if scorer(*case) != 0.0] == []


@pytest.mark.parametrize(
    ("scorer", "gold"),
    [(score_integer, "080 or 081"), (score_integer, ""), (score_integer, "x"), (score_choice, "Colorectal cancer")],
)
def test_a_malformed_reference_is_an_error_and_not_a_zero(scorer, gold):
    with pytest.raises(ValueError):
        scorer("80", gold)


def table_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()
    lines = page.partition("<!-- table: scorers -->\n")[2].partition("\n\n")[0].splitlines()
    head, _, *rows = (re.split(r"\s*\|\s*", line)[1:-1] for line in lines)
    for texts, gold, *marks in rows:
        for name, mark in zip(head[2:], marks, strict=True):
            if mark:
                yield from ((name, text, gold.strip("`"), mark) for text in re.findall("`([^`]+)`", texts))


SCORERS = {"text": exact_match, "integer": score_integer, "math": score_math, "gaia": score_gaia}


def test_scorers_accept_what_the_table_of_the_docs_says():
    rows = list(table_of_the_docs())
    assert len(rows) > 150
    assert [row for row in rows if SCORERS[row[0]](row[1], row[2]) != {"yes": 1.0, "no": 0.0}[row[3]]] == []


def notations(value):
    """Return what every scorer of numbers reads, and what only maths does."""
    exact, text = Fraction(value), f"{value.normalize():f}"
    sign, grouped = "-" * (value < 0), f"{value:,f}"
    read = [text, f"${text}$", f"\\${text}", f"**{text}**", f"\\boxed{{{text}}}", f"{text}e0", f"{value * 100:f}\\%"]
    read += [text.replace("-", "−"), "".join(chr(0xFEE0 + ord(one)) for one in text)]
    read += [grouped.replace(",", one) for one in (",", "{,}", "\\,", "\u202f")]
    whole, rest = divmod(abs(exact), 1)
    computed = [f"{exact}", f"\\frac{{{exact.numerator}}}{{{exact.denominator}}}"]
    if whole and rest:
        computed += [f"{sign}{whole} {rest}", f"{sign}{whole}\\frac{{{rest.numerator}}}{{{rest.denominator}}}"]
    return read, computed


NUMBERS = st.decimals(-3000, 3000, allow_nan=False, places=2) | st.integers(-(10**7), 10**7).map(Decimal)


@settings(max_examples=60, deadline=None)
@given(NUMBERS, NUMBERS)
def test_equal_numbers_and_no_others_are_equal_in_all_notations(one, other):
    [gold, *_], [*_, fraction] = notations(one)
    for value in (one, other, one * 10, one / 10, -one):
        read, computed = notations(value)
        assert {score_math(text, gold) for text in read} == {float(value == one)}
        assert {same_value(text, gold) for text in computed} == {value == one}
        assert value == one or not any(exact_match(text, f"{gold}\n{fraction}") for text in read)


LETTERS, SIGNS = ("A", "B", "C", "D"), ("+", "-", "*", "/", "%", "...")


@pytest.mark.parametrize("gold", [*LETTERS, "The", *SIGNS])
@pytest.mark.parametrize("scorer", [exact_match, token_f1])
def test_reference_of_only_an_article_or_punctuation_equals_only_itself(scorer, gold):
    texts = ("", " ", ".", "the", "an", *LETTERS, *SIGNS)
    assert [text for text in texts if text.casefold() != gold.casefold() and scorer(text, gold)] == []
    assert scorer(f" {gold.lower()} ", gold) == 1.0


@pytest.mark.parametrize("scorer", [exact_match, token_f1])
def test_a_letter_may_have_punctuation_and_a_blank_line_is_not_an_alias(scorer):
    for letter in LETTERS:
        assert [scorer(text, letter) for text in (f"{letter}.", f"({letter.lower()})", f"{letter}:")] == [1.0] * 3
        assert [exact_match(text, letter) for text in (f"{letter} {letter}", f"not {letter}")] == [0.0, 0.0]
    for gold in ("Paris\n", "\nParis", "Paris\n \nParigi"):
        assert [scorer(text, gold) for text in ("paris", "", " ")] == [1.0, 0.0, 0.0]


def test_token_f1_is_the_harmonic_mean_of_shared_words_over_the_best_alias():
    # 2 of 3 words of the answer, 2 of 2 of the alias: 2 * 2 / (3 + 2).
    assert token_f1("president James Madison", "adams\nJames Madison") == pytest.approx(0.8)
    # A repeated word is shared as often as both texts have it.
    assert token_f1("new new york", "new york") == pytest.approx(0.8)
    assert token_f1("no James", "no") == 0.0
    assert token_f1("nothing", "james") == 0.0


@pytest.mark.parametrize("tower", ["9^{9^{999}}", "9999999!"])
def test_text_whose_check_hangs_is_wrong_and_costs_no_other_answer(monkeypatch, tower):
    score_math("9*3", "27")  # starts the process
    with monkeypatch.context() as patched:
        patched.setattr("reward.scorers.math.LIMIT_S", 2.0)
        assert score_math(tower, "54/2") == 0.0
    assert score_math("9*3", "27") == 1.0


def test_check_beyond_its_limit_is_unscored_and_neither_it_nor_a_dead_process_costs_the_next_answer(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("reward.scorers.math.LIMIT_S", 0.0)
        with pytest.raises(ScoringError):
            score_math("9*3", "27")
    assert score_math("9*3", "27") == 1.0
    _CHILDREN[MAX_MEMORY].kill()
    assert score_math("9*3", "27") == 1.0


@settings(max_examples=60, deadline=None)
@given(ANY_TEXT | EXPRESSION_TEXT, MATH_TEXT)
def test_no_text_makes_a_scorer_raise(text, formula):
    for scorer, gold in (
        (exact_match, "yes"),
        (token_f1, "a b"),
        (score_gaia, "3, x"),
        (score_choice, CHOICE),
        (score_integer, "204"),
        (is_solution, (1, 1, 1, 8)),
    ):
        assert 0.0 <= scorer(text, gold) <= 1.0
    assert same_value(formula, "27") in (True, False)


def test_only_short_answers_have_partial_credit():
    task = Task(id="1", dataset="musique", question="?", answer="George Sarton")
    assert partial_credit(task, "Sarton") == pytest.approx(2 / 3)
    assert partial_credit(task, None) == 0.0
    assert partial_credit(Task(id="1", dataset="medqa", question="?", answer=CHOICE), "C") is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_generated_task_is_scored_by_its_own_answer(family):
    task = generate(family, split="train", index=0, seed=0).task
    assert score_answer(task, task.answer) == 1.0
    assert score_answer(task, str(int(task.answer) + 1)) == 0.0


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
    assert is_solution(render(tree), leaves(tree)) == float(worth_24)
    assert is_solution(render(tree), [*leaves(tree), 1]) == 0.0


@given(st.integers(-(10**9), 10**9), st.integers(-99, 999))
def test_integer_accepts_plain_and_grouped_digits_of_exactly_the_right_integer(number, other):
    for text in (str(number), f"{number:,}", f"\\boxed{{{number:03d}}}"):
        assert score_integer(text, str(number)) == 1.0
        assert score_integer(text, str(other)) == float(number == other)


@pytest.mark.parametrize("piece", ["(", "1+", "$", " ", "9", "\\boxed{"])
def test_hostile_texts_take_no_time(piece):
    text, started = piece * 1_000_000, time.process_time()
    for candidate in (text, text[:200], text[:64]):
        assert score_integer(candidate, "204") == 0.0
        assert is_solution(candidate, (1, 1, 1, 8)) == 0.0
    assert time.process_time() - started < 1
