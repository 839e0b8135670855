"""A run that is submitted to a real cluster, gets a second machine while it runs, is stopped and resumed.

Engine and learner are simulated, everything else is real.
"""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_nodes
from stage import check_law, groups_of, steps_of, wait_until

from ray_jobs import submit
from ray_jobs.cli import main
from tests.faults.machines import Machines

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults]

JOIN_S = 30.0
"""A machine that joins is put to use within that."""

NUM_STEPS = 160
"""Of half a second each: there must be some left when the second machine has come and the run is stopped."""

RUN = (
    *("configs/recipes/prm_cpu.toml", "name=job", f"num_steps={NUM_STEPS}", "batch_groups=2", "pipeline_depth=2"),
    *("max_staleness=1000", "max_empty_batches=1000", "rollout.group_size=4", "rollout.max_workers=2"),
    *("rollout.engine.max_num_seqs=8", "rollout.engine.num_threads=1", "learner.num_threads=1"),
    *("learner.checkpoint_every=2", "cold_start.num_demonstrations=0", "evaluation.num_tasks=2"),
    *("evaluation.num_untouched_tasks=1", "reward.credit=outcome", "cluster.patience_s=300"),
)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    machines = Machines(tmp_path_factory.mktemp("cluster"))
    try:
        machines.start_head(num_cpus=2)
        yield machines
    finally:
        machines.stop()


@pytest.fixture
def agentflow(machines, monkeypatch, capsys, ray_token):
    """Runs `agentflow` as a user would, in the project's folder; returns the exit code and what it printed."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(submit, "COMMAND", ("python", "tests/ray_jobs/simulated_agentflow.py"))
    ray_token(machines.token_path)

    def run(*arguments):
        code = main([*arguments, "--address", machines.dashboard])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_run_is_submitted_joined_by_a_machine_stopped_and_resumed(machines, agentflow, tmp_path):
    if shutil.which("unshare") is None or not may_mount():
        pytest.skip("a machine that does not see the run folder needs `unshare --mount`: run as root, with util-linux")
    folder = tmp_path / "runs" / "job"
    code, said = agentflow("submit", *RUN, f"output_dir={tmp_path}/runs", "--phase", "train")
    assert code == 0, said
    job = re.search(r"submitted ([^\s:]+)", said)[1]
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(steps_of(folder)) >= 2)
    client = JobSubmissionClient(machines.dashboard)
    assert client.get_job_status(job) == JobStatus.RUNNING

    added = time.monotonic()
    machines.add(num_cpus=1, without=tmp_path / "runs")
    wait_until(lambda: sum(node.state == "ALIVE" for node in list_nodes(address=machines.dashboard)) == 2)
    joined = time.monotonic()
    wait_until(lambda: worked(folder, 1))
    used_after = time.monotonic() - joined
    print(f"a machine started in {joined - added:.1f} s and was used {used_after:.1f} s later")
    assert used_after < JOIN_S

    client.stop_job(job)
    wait_until(lambda: client.get_job_status(job) == JobStatus.STOPPED)
    before = len(steps_of(folder))
    assert before < NUM_STEPS

    code, said = agentflow("submit", *RUN, f"output_dir={tmp_path}/runs", "--phase", "resume", "--follow")
    assert code == 0, said
    assert "report:" in said
    assert steps_of(folder) == list(range(1, NUM_STEPS + 1))
    facts = json.loads((folder / "phases.json").read_text())["reinforce"]["facts"]
    assert check_law(folder, facts)["trained"] == 2 * NUM_STEPS


def test_job_that_fails_says_what_to_fix(agentflow):
    code, said = agentflow("submit", *RUN, "output_dir=/proc/nowhere", "--phase", "train", "--follow")
    assert code == 1
    assert "/proc/nowhere/job" in said


def worked(folder, worker):
    return any(row["worker"] == worker for row in groups_of(folder))


def may_mount():
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
