"""The table of metrics: every name that a run logs, its unit, what it says, and what it stands beside."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from actors.cluster import WORKER_GAUGES
from envs.datasets.families import FAMILIES

Unit = Literal["share", "s", "count", "tokens", "versions", "steps", "nats", "number"]
"""`share` is in [0, 1]; `number` has no unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`name` is `group/rest`; `says` is one line without a full stop."""

    name: str
    unit: Unit
    says: str

    @property
    def title(self) -> str:
        """The name without its group, as people say it."""
        return title_of(self.name)


def title_of(name: str) -> str:
    rest = name.partition("/")[2]
    return f"{rest.removesuffix('_s')} seconds".replace("_", " ") if rest.endswith("_s") else rest.replace("_", " ")


def _metrics(group: str, *rows: tuple[str, Unit, str]) -> tuple[Metric, ...]:
    return tuple(Metric(name=f"{group}/{rest}", unit=unit, says=says) for rest, unit, says in rows)


LOGGED: tuple[Metric, ...] = (
    *_metrics(
        "rollout",
        ("solve_rate", "share", "Mean score of all groups' scored trajectories since the step before; 1 is right"),
        ("trajectories", "count", "Trajectories of groups that ended since the step before, dropped groups included"),
        ("turns", "number", "Planner turns per trajectory, malformed ones too"),
        ("sampled_tokens", "tokens", "Sampled tokens per trajectory, those of frozen modules included"),
        ("format_errors", "number", "Malformed planner turns per trajectory"),
        ("truncated_share", "share", "Trajectories with a turn that the token limit cut off"),
        ("tool_errors", "number", "Tool calls per trajectory that ended in an error"),
        ("repeat_share", "share", "Planner turns that repeat a tool call of the same trajectory"),
        (
            "infrastructure_failures",
            "count",
            "Trajectories that a tool or engine left unscored; groups tried again are not in it",
        ),
        ("groups_kept_share", "share", "Groups with signal, some right and some wrong, among those that ended"),
    ),
    *_metrics(
        "mix",
        *(
            (family, "share", f"Groups of the generated family {family} among those that ended since the step before")
            for family in FAMILIES
        ),
    ),
    *_metrics(
        "solved",
        *((family, "share", f"Solve rate while sampling, over the last 8 groups of {family}") for family in FAMILIES),
    ),
    *_metrics(
        "held_out",
        ("solve_rate", "share", "Held-out tasks solved greedily after this step (evaluation.every_steps)"),
        ("low", "share", "Lower end of its 95% Wilson interval"),
        ("high", "share", "Upper end of its 95% Wilson interval"),
        ("tasks", "count", "Held-out tasks that were scored for held_out/solve_rate"),
        ("unscored", "count", "Held-out tasks that engine or tools broke every time, or a scorer could not tell"),
        ("policy_version", "versions", "The policy version that made all attempts of the evaluation"),
        ("wall_s", "s", "Seconds that the loop waited for this evaluation"),
    ),
    *_metrics(
        "policy",
        ("loss", "number", "The objective that was minimised; with normalised advantages its level says little"),
        ("grad_norm", "number", "Norm of the gradient before it was clipped"),
        ("skipped", "count", "1 where the guard refused the step: the weights are those of before"),
        ("choice_tokens", "count", "Loss tokens that sampler or learner gave a probability below 0.999"),
        ("choice_tokens_age0", "count", "Those sampled by the very weights that are updated"),
        ("choice_tokens_stale", "count", "Those sampled by older weights"),
        ("ratio", "number", "Mean ratio of the learner's probability to the sampler's, over choice tokens"),
        ("clip_high", "share", "Loss tokens above the trust region and pushed up: no gradient (cispo: weight bounded)"),
        ("clip_low", "share", "Loss tokens below the trust region and pushed down: no gradient"),
        ("effective_sample_size", "share", "How even the choice tokens' ratios are; near 0 a few tokens rule"),
        ("effective_sample_size_age0", "share", "The same at tokens of the very weights"),
        ("effective_sample_size_stale", "share", "The same at tokens of older weights"),
        (
            "correction_masked_share",
            "share",
            "Loss tokens inside the trust region to which the correction gave weight 0",
        ),
        ("stale_masked_share", "share", "Sampled tokens left out of the loss as older than max_staleness"),
        ("logprob_gap_abs", "nats", "Mean distance of learner's and engine's log-probs over choice tokens"),
        ("mismatch_k3", "nats", "Estimated KL divergence of learner from sampler, per choice token"),
        ("mismatch_k3_age0", "nats", "The same at tokens of the very weights: numerical, or a fault"),
        ("mismatch_k3_stale", "nats", "The same at tokens of older weights: numerical and staleness together"),
        ("staleness_max", "steps", "Age of the batch's oldest trained token: train steps since the weights it is of"),
        ("age_mean", "steps", "Mean age of the trained tokens"),
        ("kl_ref_k3", "nats", "Estimated KL divergence from the policy that RL started with (flow_grpo, own loss)"),
    ),
    *_metrics(
        "prm",
        ("score", "share", "Mean score that the process reward model gave a step"),
        ("unscored_share", "share", "Steps that the PRM was asked about and gave no usable score"),
        ("saturated_share", "share", "Scores within 0.02 of 0 or 1"),
        ("length_correlation", "number", "Correlation of score and decision length"),
        (
            "sibling_auroc",
            "share",
            "Attempts with a higher mean score than a sibling whose outcome is worse; 0.5 is chance",
        ),
        ("sibling_z", "number", "How far prm/sibling_auroc is from chance, in standard deviations; far below 0 alarms"),
        ("weight", "number", "Weight of the step scores in the advantage; alarms lower it, quiet steps bring it back"),
        ("canary_max", "share", "Highest score of a junk decision in any group; the PRM must see through them"),
        ("rejudge_mse", "number", "Mean squared error of the scores against the known plan, on the batch's groups"),
    ),
    *_metrics(
        "bias",
        (
            "length_trained_over_drawn",
            "number",
            "Tokens of trained groups over all with signal; 1 is unbiased",
        ),
        ("slow_decile_share", "share", "Trained groups among the slowest tenth of those with signal; 0.1 is unbiased"),
    ),
    *_metrics(
        "groups",
        ("drawn", "count", "Groups drawn so far; the other groups/ counts add up to it"),
        ("queued", "count", "Groups that wait for a worker"),
        ("running", "count", "Groups that are rolled out now"),
        ("ready", "count", "Groups with signal that wait for their batch"),
        ("in_batch", "count", "Groups of the batch that is trained now"),
        ("trained", "count", "Groups trained so far"),
        ("refused", "count", "Groups so far of batches that the guard refused: they have trained nothing"),
        ("all_right", "count", "Groups dropped so far because every trajectory was right"),
        ("all_wrong", "count", "Groups dropped so far because every trajectory was wrong"),
        ("overlong", "count", "Groups dropped so far because the overlong rule left no difference to train on"),
        ("failed", "count", "Groups given up so far after the last attempt"),
        ("expired", "count", "Groups dropped so far as too stale; their tasks were drawn again"),
    ),
    *_metrics(
        "learner",
        ("step_s", "s", "Seconds of the optimizer step"),
        ("wait_s", "s", "Seconds that the learner waited for its batch"),
        ("publish_s", "s", "Seconds to publish the new weights, on the learner's side"),
        ("loss_tokens", "tokens", "Tokens that were trained"),
        ("packed_tokens", "tokens", "Tokens that were computed, shared prefixes once"),
        ("sequence_tokens", "tokens", "Tokens of the trajectories, shared prefixes every time"),
    ),
    *_metrics("time", ("step_s", "s", "Seconds of a train step: waiting for its batch, computing, publishing")),
    *_metrics(
        "util",
        ("bottleneck", "number", "Which part limits the run, by its number (see docs/metrics.md)"),
        ("learner_busy", "share", "Of the loop's time: the learner computes"),
        ("learner_wait", "share", "Of the loop's time: the learner waits for a batch"),
        ("publish", "share", "Of the loop's time: new weights are published"),
        ("engine_busy", "share", "Of the workers' time: their engine computes"),
        ("backpressure", "share", "Of the workers' time: they wait for admission with places free"),
        ("tool_wait", "share", "Of the trajectories' time: in tools, or in what an agent of one's own does itself"),
        ("prm_wait", "share", "Of the groups' time: they wait for PRM scores"),
        ("kept_share", "share", "Groups with signal among those that ended, as the verdict counts them"),
        ("places_used", "share", "Running groups over the places that the engines' caches allow"),
        (
            "repeated",
            "share",
            "Of the tokens that engines compute: computed for the turn before, and evicted since",
        ),
    ),
    *_metrics(
        "cold_start",
        ("loss", "nats", "Mean negative log-likelihood of the demonstrations' tokens"),
        ("grad_norm", "number", "Norm of the gradient before it was clipped"),
        ("step_s", "s", "Seconds of the optimizer step"),
        ("packed_tokens", "tokens", "Tokens that were computed, shared prefixes once"),
    ),
    *_metrics("train_prm", ("loss", "number", "Loss of the process reward model on a batch of labelled steps")),
)
"""What stands in metrics.jsonl."""

_LIVE_UNITS: dict[str, Unit] = {"worker/policy_version": "versions", "worker/kv_usage": "share"}
LIVE: tuple[Metric, ...] = tuple(
    Metric(name=name, unit=_LIVE_UNITS.get(name, "count"), says=says) for name, says in WORKER_GAUGES.items()
)
"""Gauges that rollout workers set themselves, as it happens; each carries the worker's number."""

BY_NAME = {metric.name: metric for metric in (*LOGGED, *LIVE)}
DESCRIPTIONS = {metric.name: metric.says for metric in LOGGED}

CHARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "Is it learning?": {
        "Solved": ("rollout/solve_rate",),
        "Groups with signal": ("rollout/groups_kept_share",),
        "Held-out tasks solved": ("held_out/solve_rate", "held_out/low", "held_out/high"),
        "Solved, by family": tuple(f"solved/{family}" for family in FAMILIES),
        "Tasks drawn": tuple(f"mix/{family}" for family in FAMILIES),
        "Steps per trajectory": ("rollout/turns",),
        "Tokens per trajectory": ("rollout/sampled_tokens",),
        "Trajectories per train step": ("rollout/trajectories", "rollout/infrastructure_failures"),
        "Errors per trajectory": ("rollout/format_errors", "rollout/tool_errors"),
        "Cut off or repeating": ("rollout/truncated_share", "rollout/repeat_share"),
        "Held-out tasks": ("held_out/tasks", "held_out/unscored"),
        "Version that was evaluated": ("held_out/policy_version",),
        "Seconds per evaluation": ("held_out/wall_s",),
    },
    "What limits the speed?": {
        "The bottleneck": ("util/bottleneck",),
        "The learner": ("util/learner_busy", "util/learner_wait", "util/publish"),
        "The workers": ("util/engine_busy", "util/backpressure", "util/places_used", "util/repeated"),
        "Waiting for others": ("util/tool_wait", "util/prm_wait", "util/kept_share"),
        "Seconds per train step": ("time/step_s", "learner/step_s", "learner/wait_s", "learner/publish_s"),
        "Tokens per train step": ("learner/loss_tokens", "learner/packed_tokens", "learner/sequence_tokens"),
    },
    "Where are the groups?": {
        "Ended so far": (
            "groups/trained",
            "groups/refused",
            "groups/all_right",
            "groups/all_wrong",
            "groups/overlong",
            "groups/failed",
            "groups/expired",
        ),
        "Live now": ("groups/queued", "groups/running", "groups/ready", "groups/in_batch"),
        "Drawn so far": ("groups/drawn",),
        "Length of what is trained": ("bias/length_trained_over_drawn",),
        "Share of the slow": ("bias/slow_decile_share",),
    },
    "How stale is the data, and do engine and learner agree?": {
        "Age of trained tokens": ("policy/staleness_max", "policy/age_mean"),
        "Log prob gap": ("policy/logprob_gap_abs",),
        "Mismatch": ("policy/mismatch_k3", "policy/mismatch_k3_age0", "policy/mismatch_k3_stale"),
        "Effective sample size": (
            "policy/effective_sample_size",
            "policy/effective_sample_size_age0",
            "policy/effective_sample_size_stale",
        ),
        "Choice tokens": ("policy/choice_tokens", "policy/choice_tokens_age0", "policy/choice_tokens_stale"),
        "Left out of the loss": ("policy/stale_masked_share", "policy/correction_masked_share"),
    },
    "Is the update sound?": {
        "Loss": ("policy/loss",),
        "Gradient norm": ("policy/grad_norm",),
        "Ratio": ("policy/ratio",),
        "Clipped": ("policy/clip_low", "policy/clip_high"),
        "Skipped steps": ("policy/skipped",),
        "KL from the policy at the start": ("policy/kl_ref_k3",),
    },
    "Can the process reward model be trusted?": {
        "Mean score": ("prm/score", "prm/canary_max"),
        "Above siblings that did worse": ("prm/sibling_auroc",),
        "How far from chance": ("prm/sibling_z",),
        "Saturated or missing": ("prm/saturated_share", "prm/unscored_share"),
        "Correlation with length": ("prm/length_correlation",),
        "Weight": ("prm/weight",),
        "Error on fresh rollouts": ("prm/rejudge_mse",),
    },
    "Before reinforcement learning": {
        "Cold start": ("cold_start/loss",),
        "Cold start gradient": ("cold_start/grad_norm",),
        "Cold start seconds": ("cold_start/step_s",),
        "Cold start tokens": ("cold_start/packed_tokens",),
        "PRM training": ("train_prm/loss",),
    },
}
"""Charts by the question that they answer, each with metrics of one unit: the custom scalars of TensorBoard, and the
order of docs/metrics.md."""

INTERVALS = {"held_out/solve_rate": ("held_out/low", "held_out/high")}
"""The ends of a metric's interval."""

FIRST = {"rollout/solve_rate": "Is it learning?/solved"}
"""TensorBoard opens on all tags in the order of their characters. This metric is written a second time, under a tag
that comes before all others, so that TensorBoard opens on the answer to the first question."""
