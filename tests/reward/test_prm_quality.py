import itertools
import math
import random

import numpy as np
import pytest

from envs.types import Task
from reward.prm.quality import auroc, clustered_interval, evaluate_prm, quality_report, spearman
from reward.prm.step_text import step_texts
from reward.prm.training import LabelledStep, PrmData
from rollout.types import Reward
from tests.changed import replace
from tests.reward.test_step_text import decided, make_trajectory

LABEL = np.array([0.0, 0.2, 0.4, 0.4, 0.8, 1.0])
PRED = np.array([0.1, 0.1, 0.5, 0.3, 0.9, 0.8])


def near(value):
    return pytest.approx(value, abs=1e-9)


def test_spearman_uses_average_ranks():
    assert spearman(LABEL, PRED) == near(0.911764705882)
    assert spearman(LABEL, np.exp(9 * LABEL)) == near(1.0)
    assert spearman(np.arange(3.0), -np.arange(3.0)) == near(-1.0)
    assert spearman(np.full(6, 0.1), PRED) is None


def test_auroc_equals_the_share_of_ordered_pairs():
    rng = random.Random(0)
    scores = np.array([rng.randrange(5) / 4 for _ in range(40)])
    right = np.array([float(rng.random() < 0.4) for _ in range(40)])
    pairs = list(itertools.product(scores[right == 1], scores[right == 0]))
    assert auroc(scores, right) == near(sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs))
    assert auroc(scores, np.ones(40)) is None


def test_coverage_of_the_interval_of_a_mean():
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        clusters = [str(cluster) for cluster in range(25) for _ in range(4)]
        values = np.repeat(rng.normal(size=25), 4) + rng.normal(size=100)
        low, high = clustered_interval(
            lambda column: float(column.mean()), clusters, [values], seed=seed, num_draws=200
        )
        covered += low <= 0 <= high
    assert 0.86 <= covered / 200 <= 0.99


def judged(turn, **facts):
    outcome = float(facts["answer"] == "42")
    return replace(make_trajectory(turn, **facts), reward=Reward(outcome=outcome, total=outcome))


def make_steps(*, num_tasks=20, score=lambda label, rng: label):
    """Groups of 4 attempts of 3 steps; an attempt is right if its mean label is above one half."""
    rng = random.Random(0)
    steps = []
    for number, attempt in itertools.product(range(num_tasks), range(4)):
        labels = [rng.choice((0.0, 0.2, 0.5, 0.7, 1.0)) for _ in range(3)]
        task = Task(id=f"t{number}", dataset="lookup", question="What?", answer="42")
        answer = "42" if sum(labels) / 3 > 0.5 else "0"
        trajectory = judged(decided("answer", answer), task=task, id=f"g{number}/{attempt}", answer=answer)
        steps += [(trajectory, label, score(label, rng)) for label in labels]
    return steps


def report_of(steps):
    trajectories, labels, scores = zip(*steps, strict=True)
    return quality_report(trajectories, np.array(labels), np.array(scores), seed=0)


def test_figures_of_a_perfect_prm():
    report = report_of(make_steps())
    assert [report[name] for name in ("auroc_step", "spearman_within_group", "auroc_outcome")] == near([1.0] * 3)
    assert report["mse"] == near(0.0)
    assert (report["num_tasks_held_out"], report["num_steps"], report["num_trajectories"]) == (20, 240, 80)


def test_figures_are_in_their_intervals_and_do_not_depend_on_the_order():
    steps = make_steps(score=lambda label, rng: 0.2 + 0.6 * label + rng.gauss(0, 0.25))
    report = report_of(steps)
    for name in ("mse", "auroc_step", "spearman_within_group", "auroc_outcome"):
        low, high = report[f"{name}_ci95"]
        assert low <= report[name] <= high
    shuffled = report_of(random.Random(1).sample(steps, len(steps)))
    assert shuffled["auroc_outcome"] == near(report["auroc_outcome"])


def make_one_step(index):
    answer = "42" if index % 2 else "0"
    task = Task(id=f"t{index}", dataset="lookup", question="What?", answer="42")
    turn = decided("answer", answer, thought=f"thought {index}")
    return judged(turn, task=task, id=f"t{index}/0", answer=answer)


def test_evaluation_scores_held_out_steps():
    trajectories = [make_one_step(index) for index in range(8)]
    steps = [LabelledStep(step=step_texts(each)[0], label=float(index % 2)) for index, each in enumerate(trajectories)]
    data = PrmData(train=tuple(steps[:4]), held_out=tuple(steps[4:]))
    report = evaluate_prm(
        data,
        trajectories,
        score=lambda scored: [None if "thought 4" in step.text else float("Input: 42" in step.text) for step in scored],
        seed=0,
    )
    assert (report["num_steps"], report["num_unscored"], report["auroc_outcome"]) == (3, 1, 1.0)
    assert math.isclose(report["mse_baseline"], 2 / 9)  # the variance of the labels 1, 0 and 1
