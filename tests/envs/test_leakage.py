import csv
import time
from collections import Counter

import pytest
from real_data import REAL_DATA, needs

from envs.datasets.benchmarks import load_aime
from envs.leakage import find_leaks, question_share

TRAIN_FILE, TEST_FILE = REAL_DATA / "aime_1983_2024.csv", REAL_DATA / "aime24.jsonl"
needs_real_files = needs(TRAIN_FILE.name, TEST_FILE.name)

LANTERNS = (
    r"A row of $60$ lanterns hangs above a canal. Every third lantern is red and every fourth lantern is cracked. "
    r"Two lanterns are chosen at random. The probability that both are red and cracked is $\frac{m}{n}$, where $m$ "
    r"and $n$ are relatively prime positive integers. Find $m+n$."
)
TRAPEZOID = (
    r"Trapezoid $ABCD$ has $\overline{AB} \parallel \overline{CD}$, $AB = 18$, $CD = 42$, height $20$. Its diagonals "
    r"meet at $P$. A line through $P$ parallel to the bases meets the legs at $X$ and $Y$. Find $10 \cdot XY$."
)
SEQUENCE = (
    r"A sequence is defined by $a_1 = 7$ and $a_{k+1} = a_k^2 - 3a_k + 4$ for every positive integer $k$. Find the "
    r"remainder when $a_{2025}$ is divided by $1000$."
)
FERRY = (
    "A ferry crosses a river that flows at a constant speed. Going with the current it needs $40$ minutes for "
    "$12$ kilometers, and against the current an hour. How many meters does a drifting log travel in $9$ minutes?"
)
POLYNOMIAL = (
    r"Let $P(x)$ be a cubic polynomial with integer coefficients whose three roots are the squares of consecutive "
    r"primes. Given that $P(0) = -11025$ and that $P$ is monic, find the sum of the absolute values of its "
    r"coefficients."
)
TESTS = [LANTERNS, TRAPEZOID, SEQUENCE, FERRY, POLYNOMIAL]

PARAPHRASES = {
    "boilerplate": r"A row of 60 lanterns hangs above a canal. Every third lantern is red, and every fourth lantern is "
    r"cracked. Two lanterns are chosen at random. The probability that both are red and cracked can be expressed as "
    r"$\dfrac pq$ for relatively prime positive integers $p$ and $q$. Compute $p+q$.",
    "latex": r"Trapezoid \(ABCD\) has \(AB \| CD\), \(AB=18\), \(CD=42\), height \(20\). Its diagonals meet at "
    r"\(P\). A line through \(P\) parallel to the bases meets the legs at \(X\) and \(Y\). Find \(10\times XY\).",
    "question": r"A sequence is given by \[a_{1}=7, \qquad a_{k+1}=a_{k}^{2}-3a_{k}+4\] for every positive integer "
    r"$k$. What is the remainder if $a_{2025}$ is divided by 1000?",
    "case and spaces": "  A FERRY crosses a river\nthat flows at a constant speed.  Going with the current it needs 40 "
    "minutes for 12 kilometers,\nand against the current an hour.  How many meters does a drifting log travel in 9 "
    "minutes ?",
    "order": r"The monic polynomial $P(x)$ is cubic with integer coefficients and $P(0)=-11025$. Its three roots are "
    r"the squares of consecutive primes. Find the sum of the absolute values of its coefficients.",
}

DIFFERENT = {
    "lanterns": r"A string of $48$ lanterns is lit one after another, each burning for twice as long as the one before "
    r"it. The probability that a lantern seen at a random moment is the last is $\frac{m}{n}$, where $m$ and $n$ are "
    r"relatively prime positive integers. Find $m+n$.",
    "trapezoid": r"Isosceles trapezoid $ABCD$ with $\overline{AB} \parallel \overline{CD}$ is circumscribed about a "
    r"circle of radius $6$. If its area is $156$, find the length of the longer base.",
    "sequence": r"Find the remainder when the sum $1^1 + 2^2 + 3^3 + \cdots + 100^{100}$ is divided by $1000$.",
    "ferry": "Two ferries leave opposite banks of a lake at the same time and pass each other $700$ meters from one "
    "bank. After turning around they meet $400$ meters from the other bank. How wide is the lake, in meters?",
    "polynomial": r"The polynomial $P(x) = x^3 - 30x^2 + ax - b$ has three positive integer roots in arithmetic "
    r"progression. Find the greatest possible value of $a + b$.",
}


@pytest.mark.parametrize("change", PARAPHRASES)
def test_a_planted_paraphrase_is_caught(change):
    assert find_leaks([(change, PARAPHRASES[change])], TESTS) == [change]


def test_a_test_question_without_its_figure_or_inside_a_longer_text_is_caught():
    shown = FERRY + ' [asy] draw((0,0)--(3,4)); label("$A$", (0,0)); [/asy]'
    long = "You are a careful tutor for young students of many countries. " * 3 + "Read on. " * 9 + DIFFERENT["ferry"]
    long += " ".join(DIFFERENT.values()) + SEQUENCE
    assert find_leaks([("shown", shown), ("long", long)], TESTS) == ["shown", "long"]


def test_another_problem_on_the_same_topic_is_clear():
    assert find_leaks(DIFFERENT.items(), TESTS) == []


def test_leaks_by_hand():
    # "abcdefghi" has the 5-grams at a, b, c, d, e; a text that ends earlier shares the first of them: 3/5, 2/6, 1/7, 0.
    texts = ("ABCDEFGHI", "abcdefg", "abcdefx", "abcdexx", "vwxyz")
    assert find_leaks([(text, text) for text in texts], ["unlike", "abcdefghi"]) == ["ABCDEFGHI", "abcdefg"]


@pytest.mark.parametrize(("left", "right"), [("", ""), ("?!?", "..."), ("", "Find $x$."), ("3+4", "3-4"), ("n", "")])
def test_empty_and_short_questions_leak_only_when_they_are_equal(left, right):
    assert find_leaks([("a", left)], [right]) == []


def test_unicode_forms_of_one_text_are_equal_and_other_scripts_are_compared():
    assert find_leaks([("a", "Wo steht die Straße von Ｍünster?")], ["wo steht die STRASSE von Mu\u0308nster"]) == ["a"]
    assert find_leaks([("a", "求方程 x² + 5x + 6 = 0 的所有实数根之和")], ["求方程x2+5x+6=0的所有实数根之和。"]) == [
        "a"
    ]
    assert find_leaks([("a", "桥上有多少盏红色的灯笼?")], ["河里的木头漂流了多远?"]) == []


@needs_real_files
def test_the_text_alone_catches_all_real_leaks_and_nothing_else():
    with TRAIN_FILE.open(encoding="utf-8", newline="") as file:
        train = [(row["ID"], row["Question"]) for row in csv.DictReader(file)]
    tests = [task.question for task in load_aime(TEST_FILE, split="eval")]
    assert len(load_aime(TRAIN_FILE, split="train")) == 918
    years = Counter("2024" if id.startswith("2024-") else "before" for id, _ in train)
    assert (years, len(tests)) == ({"before": 919, "2024": 14}, 30)
    start = time.process_time()
    leaks = find_leaks(train, tests)
    assert time.process_time() - start < 10
    assert leaks == [id for id, _ in train if id[:4] == "2024"]


# The leakage audit of retrieved texts


def test_the_share_counts_the_questions_own_grams_over_all_texts():
    # Without spaces: 16 letters, so 4 runs of 13; each text holds two of them.
    question = "abcd efgh ijkl mnop"
    assert question_share(question, ["abcdefghijklmn"]) == 0.5
    assert question_share(question, ["abcdefghijklmn", "cdefghijklmnop"]) == 1.0
    assert question_share(question, ["bcdefghijklm"]) == 0.0
    assert question_share("short", ["short"]) == 0.0
    assert question_share(question, []) == 0.0
