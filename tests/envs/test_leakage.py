import csv
import json
import time
from collections import Counter

import pytest
from real_data import REAL_DATA, needs

from envs.datasets.aime import load_aime, load_aime_without_leaks
from envs.leakage import (
    LeakCheck,
    char_grams,
    check_leaks,
    containment,
    find_leaks,
    question_share,
    write_leak_report,
)

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


@pytest.mark.parametrize(("index", "change"), [*enumerate(PARAPHRASES)])
def test_a_planted_paraphrase_is_caught_with_its_original(index, change):
    [check] = check_leaks([(change, PARAPHRASES[change])], TESTS)
    assert (check.verdict, check.test_index) == ("leak", index)
    assert check.rule in ("equal", "jaccard", "containment")


def test_a_test_question_without_its_figure_is_equal():
    shown = FERRY + ' [asy] draw((0,0)--(3,4)); label("$A$", (0,0)); [/asy]'
    [check] = check_leaks([("shown", shown)], TESTS)
    assert check == LeakCheck(id="shown", verdict="leak", rule="equal", score=1.0, test_index=3)


def test_a_test_question_inside_a_longer_text_is_caught_by_containment():
    long = "You are a careful tutor for young students of many countries. " * 3 + "Read on. " * 9 + DIFFERENT["ferry"]
    long += " ".join(DIFFERENT.values()) + SEQUENCE
    [check] = check_leaks([("prompt", long)], TESTS)
    assert (check.verdict, check.rule, check.score, check.test_index) == ("leak", "containment", 1.0, 2)


@pytest.mark.parametrize("topic", DIFFERENT)
def test_another_problem_on_the_same_topic_is_clear(topic):
    [check] = check_leaks([(topic, DIFFERENT[topic])], TESTS)
    assert (check.verdict, check.rule) == ("clear", None)


def test_similarities_by_hand():
    abcdef = char_grams("abcdef", 5)
    assert abcdef == {"abcde", "bcdef"}
    assert containment(char_grams("aaab", 2), char_grams("abab", 2)) == 1 / 2
    assert char_grams("abcd", 5) == char_grams("", 5) == frozenset()
    assert containment(frozenset(), abcdef) == 0.0


# "abcdefghi" has the 5-grams at a, b, c, d, e; a text that ends earlier shares the first of them.
@pytest.mark.parametrize(
    ("text", "score", "verdict"),
    [("abcdefg", 3 / 5, "leak"), ("abcdefx", 2 / 6, "review"), ("abcdexx", 1 / 7, "clear"), ("vwxyz", 0.0, "clear")],
)
def test_scores_and_verdicts_by_hand(text, score, verdict):
    [check] = check_leaks([("tiny", text)], ["unlike", "abcdefghi"])
    assert (check.score, check.verdict) == (score, verdict)
    assert check.test_index == (1 if score else None)


@pytest.mark.parametrize(("left", "right"), [("", ""), ("?!?", "..."), ("", "Find $x$."), ("3+4", "3-4"), ("n", "")])
def test_empty_and_short_questions_leak_only_when_they_are_equal(left, right):
    assert find_leaks([("a", left)], [right]) == []


def test_unicode_forms_of_one_text_are_equal_and_other_scripts_are_compared():
    assert find_leaks([("a", "Wo steht die Straße von Ｍünster?")], ["wo steht die STRASSE von Mu\u0308nster"]) == ["a"]
    assert find_leaks([("a", "求方程 x² + 5x + 6 = 0 的所有实数根之和")], ["求方程x2+5x+6=0的所有实数根之和。"]) == [
        "a"
    ]
    assert find_leaks([("a", "桥上有多少盏红色的灯笼?")], ["河里的木头漂流了多远?"]) == []


def test_the_report_says_what_was_dropped_and_why(tmp_path):
    tests = ["unlike", "abcdefghi", "ß" * 100]
    train = [("same", "ABCDEFGHI"), ("near", "abcdefx"), ("far", "vwxyz"), ("long", "ß" * 100)]
    write_leak_report(tmp_path / "leaks.json", check_leaks(train, tests), tests)
    report = json.loads((tmp_path / "leaks.json").read_text(encoding="utf-8"))
    place = {"test_index": 1, "test_question": "abcdefghi"}
    assert report == {
        "thresholds": {"jaccard": 0.45, "containment": 0.6, "review": 0.3},
        "checked": 4,
        "test_questions": 3,
        "dropped": [
            {"id": "same", "rule": "equal", "score": 1.0, **place},
            {"id": "long", "rule": "equal", "score": 1.0, "test_index": 2, "test_question": "ß" * 80},
        ],
        "review": [{"id": "near", "rule": None, "score": 0.3333, **place}],
    }


def write_aime(path, *rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["ID", "Year", "Problem Number", "Question", "Answer", "Part"])
        writer.writerows([id, id[:4], id.split("-")[-1], question, answer, ""] for id, question, answer in rows)
    return path


def test_training_loses_leaks_and_the_test_year(tmp_path):
    path = write_aime(
        tmp_path / "a.csv",
        ("1999-1", DIFFERENT["ferry"], "073"),
        ("1999-2", PARAPHRASES["order"], "5"),
        ("2022-II-8", DIFFERENT["sequence"], "080 or 081 (both were accepted)"),
        ("2024-I-1", PARAPHRASES["latex"], "252"),
        ("2024-I-2", DIFFERENT["trapezoid"], "20"),
    )
    tasks, checks = load_aime_without_leaks(path, test_questions=TESTS, whole_file=False)
    assert [(task.id, task.answer) for task in tasks] == [("1999-1", "73")]
    rules = [("1999-1", None), ("1999-2", "jaccard"), ("2024-I-1", "year"), ("2024-I-2", "year")]
    assert [(check.id, check.rule) for check in checks] == rules
    assert [check.verdict for check in checks] == ["clear", "leak", "leak", "leak"]
    with pytest.raises(ValueError):
        load_aime_without_leaks(path, test_questions=TESTS)


@needs_real_files
def test_the_text_alone_catches_all_real_leaks_and_nothing_else():
    with TRAIN_FILE.open(encoding="utf-8", newline="") as file:
        train = [(row["ID"], row["Question"]) for row in csv.DictReader(file)]
    tests = [task.question for task in load_aime(TEST_FILE, split="eval")]
    years = Counter("2024" if id.startswith("2024-") else "before" for id, _ in train)
    assert (years, len(tests)) == ({"before": 919, "2024": 14}, 30)
    start = time.process_time()
    checks = check_leaks(train, tests)
    assert time.process_time() - start < 10
    assert [check.id for check in checks if check.verdict == "leak"] == [id for id, _ in train if id[:4] == "2024"]
    assert [check.id for check in checks if check.verdict == "review"] == []


# The leakage audit of retrieved texts


def test_the_share_counts_the_questions_own_grams_over_all_texts():
    # Without spaces: 16 letters, so 4 runs of 13; each text holds two of them.
    question = "abcd efgh ijkl mnop"
    assert question_share(question, ["abcdefghijklmn"]) == 0.5
    assert question_share(question, ["abcdefghijklmn", "cdefghijklmnop"]) == 1.0
    assert question_share(question, ["bcdefghijklm"]) == 0.0
    assert question_share("short", ["short"]) == 0.0
    assert question_share(question, []) == 0.0
