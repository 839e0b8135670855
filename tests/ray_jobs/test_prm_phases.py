from types import SimpleNamespace

from configs.run import RunConfig
from envs.datasets.generated import generate
from ray_jobs.prm import CollectedGroups, collect, label, learn_prm
from reward.labels import StepLabel, append_label
from reward.prm.step_text import step_texts
from rollout.types import Group, StepScores
from tests.reward.test_step_text import decided, make_trajectory

PLANNED = generate("lookup", split="train", index=0, seed=0).task


def make_group(name, *scores, task=PLANNED, scored=True):
    """Return a group of one-step trajectories with a wrong answer, which the plan scores 0."""
    trajectories = tuple(
        make_trajectory(decided("answer", "-1", "-1"), task=task, id=f"{name}/{number}", answer="-1")
        for number in range(len(scores))
    )
    group = Group(id=name, trajectories=trajectories)
    if scored:
        StepScores(raw=tuple((score,) for score in scores), prm_digest="d").write_to(group)
    return group


def test_finished_phases_are_read_from_the_run_folder(tmp_path):
    group, loaded = make_group("g0", 0.1, 0.2, scored=False), []
    folder = SimpleNamespace(collected=tmp_path / "collected", labels=tmp_path / "labels.jsonl", prm=tmp_path / "prm")
    CollectedGroups(folder.collected).add(group)
    known = StepLabel.of(step_texts(group.trajectories[0])[0], labeller="plan", score=0.5)
    append_label(folder.labels, known)
    # There is no engine and no labeller: any work would fail.
    prm = SimpleNamespace(load=loaded.append)
    run = SimpleNamespace(config=RunConfig(), folder=folder, prm=prm, finished=lambda phase: {})
    collected = collect(run)
    labels = label(run, collected)
    learn_prm(run, collected, labels)
    assert [trajectory.id for trajectory in collected] == ["g0/0", "g0/1"]
    assert labels == [known]
    assert loaded == [folder.prm]
