"""The skill's tasks and reward, when a curve reaches it, and that nothing is measured twice."""

import argparse
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import time_to_skill
from benchmarks.expressions import FORMS, SIZES, Sentence, score, solved, tasks, teach
from benchmarks.skill_curves import Curve, Point, drawing, table
from benchmarks.skill_job import MICROBATCHES, NUM_PROMPTS, job_of, recipe
from configs.loading import load_run_config
from envs.datasets.own import OwnSources
from envs.datasets.sampler import cold_start_tasks, evaluation_tasks, training_tasks
from envs.datasets.split import question_key
from tests.changed import replace

LESS = Sentence("-", "*", 64, 17, 3)
FROM = Sentence("+", "c-", 2, 5, 90)


@pytest.fixture
def config():
    return load_run_config(recipe("expressions"), [])


def test_a_sentence_asks_for_two_steps_and_has_their_value():
    assert LESS.question == "Write as one expression: Take 17 from 64, then multiply by 3."
    assert (LESS.row["answer"], LESS.value) == ("(64-17)*3", 141)
    assert FROM.question == "Write as one expression: Add 2 and 5, then take that from 90."
    assert (FROM.row["answer"], FROM.value) == ("90-(2+5)", 83)


def test_mixed_up_are_the_two_operators():
    assert LESS.row["mixed_up"] == "(64*17)-3"
    assert FROM.row["mixed_up"] == "90+(2-5)"
    assert sorted(FROM.row["others"]) == sorted(
        f"90{second}(2{first}5)" for first, second in ("++", "+*", "--", "-*", "*+", "*-", "**")
    )


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("(64-17)*3", True),
        ("3*(64-17)", True),
        (" 3 * ( 64 - 17 ) ", True),
        ("(64-17)*3 = 141", True),
        ("64-17*3", False),
        ("(17-64)*3", False),
        ("141", False),
        ("47*3", False),
        ("(64-17)*3*1", False),
        ("(64-17)*3 = 141 = 141", False),
        ("The answer is (64-17)*3", False),
        ("__import__('os')", False),
        ("(" * 10_000, False),
        ("", False),
    ],
)
def test_right_is_the_value_made_of_the_numbers(text, right):
    assert solved(text, [64, 17, 3], 141) == float(right)


def test_each_task_is_solved_by_its_answer_and_not_by_what_mixes_it_up():
    rows = list(tasks())
    assert {split: sum(row["split"] == split for row in rows) for split in SIZES} == SIZES
    assert all(solved(row["answer"], row["numbers"], row["value"]) == 1.0 for row in rows)
    assert all(solved(row["mixed_up"], row["numbers"], row["value"]) == 0.0 for row in rows)


def test_tasks_are_the_same_each_time_and_of_every_form():
    rows = list(tasks())
    assert rows == list(tasks())
    held_out = [row["question"] for row in rows if row["split"] == "eval"]
    assert len({"".join(one for one in question if not one.isdigit()) for question in held_out}) == len(FORMS) == 8


def test_held_out_tasks_are_neither_trained_nor_taught(config):
    held_out = evaluation_tasks(config)
    sampler = training_tasks(config)
    trained = [sampler.task(ordinal) for ordinal in range(NUM_PROMPTS)]
    taught = [one.task for one in cold_start_tasks(config)]
    assert len(held_out) == 200
    assert len({task.question for task in trained}) == NUM_PROMPTS
    assert not {question_key(one.question) for one in held_out} & {
        question_key(one.question) for one in trained + taught
    }
    assert not {one.question for one in trained} & {one.question for one in taught}


async def test_its_teacher_is_right_in_a_quarter_and_mixes_up_half(config):
    found = OwnSources.of(config).tasks("expressions", "demonstrations")
    said = [await teach(task, [], []) for task in found]
    right = sum(score(task, text) for task, text in zip(found, said, strict=True))
    mixed_up = sum(text == task.metadata["mixed_up"] for task, text in zip(found, said, strict=True))
    assert 0.15 < right / len(found) < 0.35
    assert 0.4 < mixed_up / len(found) < 0.6


def curve(arm, *rates, seconds=10.0):
    points = [Point(step=2 * n, seconds=n * seconds, sampled=128 * n, rate=rate) for n, rate in enumerate(rates)]
    return Curve(arm=arm, seed=0, points=tuple(points))


def test_the_first_evaluation_at_or_above_the_threshold_counts():
    found = curve("ours", 0.2, 0.79, 0.8, 0.7, 0.9)
    assert found.reached(0.8) == found.points[2]
    assert found.reached(0.85) == found.points[4]
    assert found.reached(0.95) is None


def test_the_table_has_the_ratio_of_seconds_or_a_lower_bound():
    ours = curve("ours", 0.2, 0.5, 0.9)
    there, not_there = (curve("TRL", 0.2, *rates, seconds=30.0) for rates in ((0.5, 0.6, 0.7, 0.8), (0.5, 0.6, 0.7)))
    row = table([(ours, there)], 0.8).splitlines()[-1]
    assert row == "| 0 | 20.0% and 20.0% | 20 | 120 | 6.0x | 90.0% and 80.0% | 4 and 8 | 256 and 512 |"
    assert "| 20 | not in 90 | at least 4.5x |" in table([(ours, not_there)], 0.8)
    assert "| not in 10 | 120 | none |" in table([(curve("ours", 0.2, 0.5), there)], 0.8)


def test_the_drawing_has_a_line_for_each_side_of_each_seed():
    pair = curve("ours", 0.2, 0.9), curve("TRL, float32:1 & more", 0.2, 0.8, seconds=60.0)
    drawn = ElementTree.fromstring(drawing([pair, pair], 0.8))
    assert len(drawn.findall(".//{*}polyline")) == 4
    assert "TRL, float32:1 & more" in [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def options(tmp_path):
    return argparse.Namespace(
        job="expressions",
        seeds="0",
        threshold=0.8,
        every=2,
        patience=6.0,
        trl_variants="float32:1",
        out=tmp_path,
        overrides=[],
    )


@pytest.fixture
def measured(monkeypatch):
    """The arms that were run, each with a scripted curve."""
    ran = []

    def ours(config, threshold):
        assert threshold == 0.8
        start = config.run_path / "cold_start" / "v000000"
        start.mkdir(parents=True)
        (start / "adapter.safetensors").touch()
        ran.append(config.name)
        return curve("ours", 0.2, 0.9)

    def trl(config, start, variant, *, every, until):
        ran.append((config.name, variant, until))
        return curve(f"TRL, {variant}", 0.2, 0.8, seconds=60.0)

    monkeypatch.setattr(time_to_skill, "measure_ours", ours)
    monkeypatch.setattr(time_to_skill, "train_and_judge_trl", trl)
    monkeypatch.setattr(time_to_skill, "fastest_variant", lambda *_: "float32:1")
    return ran


def test_a_curve_that_is_there_is_not_measured_again(options, measured):
    first = time_to_skill.measure(options, 0)
    assert measured == ["ours-0", ("trl-0", "float32:1", (0.8, 60.0))]
    assert time_to_skill.measure(options, 0) == first == (curve("ours", 0.2, 0.9), replace(first[1]))
    (options.out / "trl-0.json").unlink()
    time_to_skill.measure(options, 0)
    assert measured[2:] == [("trl-0", "float32:1", (0.8, 60.0))]


def test_a_variant_that_was_tried_is_not_tried_again(options, config, monkeypatch):
    (options.out / "trial.json").write_text(json.dumps({"float32:1": 30.0}))
    options.trl_variants = "float32:1,float32:4"
    tried = []

    def train_trl(config, start, variant, *, every, heard):
        tried.append(variant)
        ends = [
            time_to_skill.Saved(step, seconds, 64 * step, Path("a")) for step, seconds in enumerate((0.0, 40.0, 65.0))
        ]
        assert [heard(one) for one in ends] == [True, True, False]

    monkeypatch.setattr(time_to_skill, "train_trl", train_trl)
    assert [time_to_skill.fastest_variant(options, config, Path("start")) for _ in range(2)] == ["float32:4"] * 2
    assert tried == ["float32:4"]


def test_single_variant_is_not_tried_first(options, config, monkeypatch):
    options.trl_variants = "bfloat16:8"
    monkeypatch.setattr(time_to_skill, "train_trl", lambda *_, **__: pytest.fail("was tried"))
    assert time_to_skill.fastest_variant(options, config, Path("start")) == "bfloat16:8"


def test_variants_that_nobody_names_are_of_the_precision_that_the_machine_multiplies_faster(options, config):
    seconds = {"float32:1": 30.0, "float32:4": 20.0, "bfloat16:1": 4.0, "bfloat16:4": 5.0}
    (options.out / "trial.json").write_text(json.dumps(seconds))
    options.trl_variants = None
    fastest = {"float32": "float32:4", "bfloat16": "bfloat16:1"}[config.learner.precision]
    assert time_to_skill.fastest_variant(options, config, Path("start")) == fastest


@pytest.mark.parametrize(("job", "few", "many"), [("expressions", 1, 4), ("clerk", 4, 8)])
def test_variants_that_nobody_names_are_of_the_jobs_own_microbatches(options, job, few, many):
    assert MICROBATCHES[job] == (few, many)
    config = load_run_config(recipe(job), [])
    assert job_of(config) == job
    options.trl_variants = None
    for fastest, other in ((few, many), (many, few)):
        seconds = {f"{config.learner.precision}:{fastest}": 4.0, f"{config.learner.precision}:{other}": 5.0}
        (options.out / "trial.json").write_text(json.dumps(seconds))
        variant = time_to_skill.fastest_variant(options, config, Path("start"))
        assert variant == f"{config.learner.precision}:{fastest}"


@pytest.mark.parametrize("job", ["expressions", "clerk"])
def test_each_job_keeps_its_curves_in_a_folder_of_its_own(tmp_path, monkeypatch, job):
    asked = ["time_to_skill", "--job", job, "--seeds", "0,1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", asked)
    found = []

    def measure(options, seed):
        found.append(time_to_skill._config(options, f"ours-{seed}", seed))
        return curve("ours", 0.2, 0.9), curve("TRL", 0.2, 0.8)

    monkeypatch.setattr(time_to_skill, "measure", measure)
    time_to_skill.main()
    assert [config.run_path for config in found] == [tmp_path / job / f"ours-{seed}" for seed in (0, 1)]
    assert {config.agent.function for config in found} == {
        {"expressions": "benchmarks.public.one_reply:solve", "clerk": "benchmarks.clerk:solve"}[job]
    }
    assert (tmp_path / job / "curves.svg").exists()


PEER = """
import json, sys
for step in (0, 2, 4):
    print(json.dumps({"step": step, "seconds": 1.5 * step, "adapter": f"step-{step}"}), flush=True)
    if sys.stdin.readline().strip() == "stop":
        sys.exit(int(sys.argv[1]))
"""


def listened(config, exit_code):
    config.run_path.mkdir(parents=True)
    heard = []

    def hear(saved):
        heard.append(saved)
        return saved.step < 2

    time_to_skill.listen([sys.executable, "-c", PEER, str(exit_code)], config, hear)
    return heard


def test_the_trainer_waits_for_each_evaluation_and_ends_when_it_is_told_to(tmp_path):
    config = load_run_config(recipe("expressions"), [f"output_dir={tmp_path}"])
    assert listened(config, 0) == [
        time_to_skill.Saved(0, 0.0, 0, Path("step-0")),
        time_to_skill.Saved(2, 3.0, 128, Path("step-2")),
    ]


def test_a_trainer_that_fails_ends_the_benchmark(tmp_path):
    config = load_run_config(recipe("expressions"), [f"output_dir={tmp_path}"])
    with pytest.raises(SystemExit, match=r"TRL failed with exit code 3: see .*log\.txt"):
        listened(config, 3)


KILLED = """
import json, os, signal, sys
print(json.dumps({"step": 0, "seconds": 0.0, "adapter": "step-0"}), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "-9" else sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("exit_code", [-9, 137])
def test_a_trainer_that_is_killed_for_memory_says_what_to_do(tmp_path, exit_code):
    config = load_run_config(recipe("clerk"), [f"output_dir={tmp_path}"])
    config.run_path.mkdir(parents=True)
    killed = rf"TRL was killed with exit code {exit_code}, .* memory ran out: .* more microbatches, .* --trl-variants"
    with pytest.raises(SystemExit, match=killed):
        time_to_skill.listen([sys.executable, "-c", KILLED, str(exit_code)], config, lambda _: True)
