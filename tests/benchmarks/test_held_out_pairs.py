"""What a benchmark says of held-out tasks that one of its runs could not score."""

import json

from benchmarks import ablation, async_vs_sync
from envs.types import Task
from rollout.records import trajectory_record
from rollout.types import Trajectory


def run_with(folder, rewards):
    """A run folder that ended with these rewards after RL, None for what was not scored."""
    folder.mkdir()
    with (folder / "trajectories.jsonl").open("w") as file:
        for number, reward in enumerate(rewards):
            task = Task(id=f"lookup-{number}", dataset="lookup", question="?", answer="1")
            trajectory = Trajectory(id="t", group_id="g", task=task, turns=(), answer="1", stop_reason="answered")
            for phase, given in (("eval_before", 0.0), ("eval_after", reward)):
                record = trajectory_record(trajectory, reward=given, phase=phase, step=None)
                file.write(json.dumps(record) + "\n")
    return folder


def test_ablation_compares_what_both_arms_of_a_seed_could_score(tmp_path):
    first = [run_with(tmp_path / "a", [1.0, None, 0.0]), run_with(tmp_path / "b", [0.0, 0.0])]
    other = [run_with(tmp_path / "c", [1.0, 1.0, None]), run_with(tmp_path / "d", [1.0, 0.0])]
    found = ablation._compared(first, other)
    assert (found.num_tasks, found.before, found.after, found.only_after) == (3, 1 / 3, 2 / 3, 1)


def test_asynchronous_and_synchronous_runs_are_compared_on_what_both_could_score(tmp_path):
    def arm(name, rewards):
        folder = run_with(tmp_path / name, rewards)
        row = {"policy/loss": 0.0, "time/step_s": 1.0, "learner/wait_s": 0.5, "rollout/trajectories": 2.0}
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
        facts = {"groups": {"trained": 2}, "num_trajectories": 8, "staleness": {"mean": 0.0}, "bottleneck": None}
        (folder / "phases.json").write_text(json.dumps({"reinforce": {"seconds": 2.0, "facts": facts}}))
        return async_vs_sync._arm(folder, group_size=2)

    fast, slow = [arm("fast", [1.0, 1.0, None, 0.0])], [arm("slow", [0.0, None, 1.0, 0.0])]
    assert "on 2 paired tasks" in async_vs_sync._comparison(fast, slow, "", 1.0)
    assert "33.3% of 3 " in async_vs_sync._table({("slow", "sync"): slow})
