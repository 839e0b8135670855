import re
from pathlib import Path

import torch

from actors.cluster import gauge_name
from learner.corrections import off_policy_metrics, off_policy_sums
from learner.types import StepResult, TrainBatch
from ray_jobs.run.metrics import DESCRIPTIONS
from ray_jobs.run.progress import step_metrics
from rollout.lifecycle import Batch, GroupCounts

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "agentflow.json"
WRITTEN = re.compile(
    r"""["'f](?P<name>(?:rollout|held_out|policy|prm|bias|groups|learner|time|util|cold_start|train_prm)/\w+)"""
)


def test_every_metric_of_a_train_step_is_in_the_table():
    """All that a step can say: a batch with old and new tokens, a KL term, PRM scores, signs of bias."""
    tokens = torch.tensor([[-1.0, -1.0]])
    sums = off_policy_sums(tokens, tokens, torch.ones(1, 2), torch.tensor([[0, 1]])) | {"kl_ref_k3": 1.0}
    trained = TrainBatch(microbatches=(), num_loss_tokens=2, num_trajectories=1, num_masked_tokens=0, max_age=0)
    policy = {f"policy/{name}": 1.0 for name in off_policy_metrics(sums, trained)}
    batch = Batch(
        step=1,
        refs=(),
        version_ages={0: 0},
        facts={"trajectories": 1.0, "prm_steps": 1.0, "prm_unscored": 1.0},
        solved={"lookup": 0.75, "game24": 0.5},
        bias={},
        counts=GroupCounts(),
        warning=None,
    )
    result = StepResult(policy_version=1, metrics=policy)
    row = step_metrics(batch, result, [], wait_s=1.0, train_s=1.0, publish_s=1.0)
    assert row.keys() - DESCRIPTIONS.keys() == {"solved/game24"}
    assert (row["solved/lookup"], row["solved/game24"]) == (0.75, 0.5)


def test_every_metric_in_the_code_is_in_the_table():
    rooms = ("rollout", "learner", "reward", "actors", "ray_jobs")
    texts = [path.read_text() for room in rooms for path in (ROOT / room).rglob("*.py")]
    written = {found["name"] for text in texts for found in WRITTEN.finditer(text)}
    files = {name for name in written if (ROOT / name).with_suffix(".py").exists()}
    assert len(written) > 20
    assert {name for name in written - files if f"{name}/lookup" not in DESCRIPTIONS} <= DESCRIPTIONS.keys()


def test_dashboard_names_metrics_of_the_table_only():
    """`ray_agentflow_rollout_(solve_rate|turns)` names two."""
    named = re.findall(r"(ray_agentflow_\w+)(?:\(([\w|]+)\))?", DASHBOARD.read_text())
    gauges = {start + end for start, ends in named for end in ends.split("|")}
    assert len(gauges) > 40
    assert gauges <= {f"ray_{gauge_name(name)}" for name in DESCRIPTIONS}
