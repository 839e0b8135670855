"""The table of metrics: every name that a run logs, its unit, what it says, and what it stands beside."""

from dataclasses import dataclass
from typing import Literal

from actors.cluster import WORKER_GAUGES, gauge_name

Unit = Literal["share", "s", "count", "tokens", "versions", "steps", "nats", "number"]
"""`share` is in [0, 1]; `number` has no unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """`name` is `group/rest`; `says` is one line without a full stop."""

    name: str
    unit: Unit
    says: str

    @property
    def gauge(self) -> str:
        """The name that Prometheus sees."""
        return f"ray_{gauge_name(self.name)}"

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
        ("solve_rate", "share", "Scored trajectories with the right answer, over all groups since the step before"),
        ("trajectories", "count", "Trajectories that ended since the step before, dropped groups included"),
        ("turns", "steps", "Planner steps per trajectory"),
        ("sampled_tokens", "tokens", "Sampled tokens per trajectory, those of frozen modules included"),
        ("format_errors", "number", "Malformed planner turns per trajectory"),
        ("truncated_share", "share", "Trajectories with a turn that the token limit cut off"),
        ("tool_errors", "number", "Tool calls per trajectory that ended in an error"),
        ("repeat_share", "share", "Steps that repeat a tool call of the same trajectory"),
        ("infrastructure_failures", "count", "Trajectories that could not be scored because a tool or engine failed"),
        ("groups_kept_share", "share", "Groups with signal, some right and some wrong, among those that ended"),
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
        ("clip_high", "share", "Loss tokens without gradient: already 1 + clip_high times as likely, and pushed up"),
        ("clip_low", "share", "Loss tokens without gradient: already below 1 - clip_low, and pushed down"),
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
        ("kl_ref_k3", "nats", "Estimated KL divergence from the policy that RL started with (objective flow_grpo)"),
    ),
    *_metrics(
        "prm",
        ("score", "share", "Mean score that the process reward model gave a step"),
        ("unscored_share", "share", "Steps that the PRM was asked about and gave no usable score"),
        ("saturated_share", "share", "Scores within 0.02 of 0 or 1"),
        ("length_correlation", "number", "Correlation of score and decision length"),
        ("sibling_auroc", "share", "Right attempts with a higher mean score than a wrong sibling; 0.5 is chance"),
        ("sibling_z", "number", "How far that is from chance, in standard deviations; below 0 alarms"),
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
        ("drawn", "count", "Groups drawn so far; all below add up to it"),
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
    *_metrics("time", ("step_s", "s", "Seconds from one train step to the next")),
    *_metrics(
        "util",
        ("bottleneck", "number", "Which part limits the run, by its number (see docs/metrics.md)"),
        ("learner_busy", "share", "Of the loop's time: the learner computes"),
        ("learner_wait", "share", "Of the loop's time: the learner waits for a batch"),
        ("publish", "share", "Of the loop's time: new weights are published"),
        ("engine_busy", "share", "Of the workers' time: their engine computes"),
        ("backpressure", "share", "Of the workers' time: they wait for admission with places free"),
        ("tool_wait", "share", "Of the trajectories' time: they wait for tools"),
        ("prm_wait", "share", "Of the groups' time: they wait for PRM scores"),
        ("kept_share", "share", "Groups with signal among those that ended, as the verdict counts them"),
        ("places_used", "share", "Running groups over the places that the engines' caches allow"),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Metrics in one chart: same unit, one question."""

    title: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    question: str
    panels: tuple[Panel, ...]


def _row(question: str, **panels: str) -> Row:
    """Panels by title (`_` stands for a space), each with its metrics, separated by spaces."""
    return Row(
        question=question,
        panels=tuple(
            Panel(title=title.replace("_", " "), names=tuple(names.split())) for title, names in panels.items()
        ),
    )


LOGGED_ROWS: tuple[Row, ...] = (
    _row(
        "Is it learning?",
        Solved="rollout/solve_rate",
        Groups_with_signal="rollout/groups_kept_share",
        Steps_per_trajectory="rollout/turns",
        Tokens_per_trajectory="rollout/sampled_tokens",
        Trajectories_per_train_step="rollout/trajectories rollout/infrastructure_failures",
        Errors_per_trajectory="rollout/format_errors rollout/tool_errors",
        Cut_off_or_repeating="rollout/truncated_share rollout/repeat_share",
    ),
    _row(
        "What limits the speed?",
        The_bottleneck="util/bottleneck",
        The_learner="util/learner_busy util/learner_wait util/publish",
        The_workers="util/engine_busy util/backpressure util/places_used",
        Waiting_for_others="util/tool_wait util/prm_wait util/kept_share",
        Seconds_per_train_step="time/step_s learner/step_s learner/wait_s learner/publish_s",
        Tokens_per_train_step="learner/loss_tokens learner/packed_tokens learner/sequence_tokens",
    ),
    _row(
        "Where are the groups?",
        Ended_so_far="groups/trained groups/refused groups/all_right groups/all_wrong groups/overlong groups/failed "
        "groups/expired",
        Live_now="groups/queued groups/running groups/ready groups/in_batch",
        Drawn_so_far="groups/drawn",
        Length_of_what_is_trained="bias/length_trained_over_drawn",
        Share_of_the_slow="bias/slow_decile_share",
    ),
    _row(
        "How stale is the data, and do engine and learner agree?",
        Age_of_trained_tokens="policy/staleness_max policy/age_mean",
        Log_prob_gap="policy/logprob_gap_abs",
        Mismatch="policy/mismatch_k3 policy/mismatch_k3_age0 policy/mismatch_k3_stale",
        Effective_sample_size=(
            "policy/effective_sample_size policy/effective_sample_size_age0 policy/effective_sample_size_stale"
        ),
        Choice_tokens="policy/choice_tokens policy/choice_tokens_age0 policy/choice_tokens_stale",
        Left_out_of_the_loss="policy/stale_masked_share policy/correction_masked_share",
    ),
    _row(
        "Is the update sound?",
        Loss="policy/loss",
        Gradient_norm="policy/grad_norm",
        Ratio="policy/ratio",
        Clipped="policy/clip_low policy/clip_high",
        Skipped_steps="policy/skipped",
        KL_from_the_policy_at_the_start="policy/kl_ref_k3",
    ),
    _row(
        "Can the process reward model be trusted?",
        Mean_score="prm/score prm/canary_max",
        Right_above_wrong_siblings="prm/sibling_auroc",
        How_far_from_chance="prm/sibling_z",
        Saturated_or_missing="prm/saturated_share prm/unscored_share",
        Correlation_with_length="prm/length_correlation",
        Weight="prm/weight",
        Error_on_fresh_rollouts="prm/rejudge_mse",
    ),
    _row(
        "Before reinforcement learning",
        Cold_start="cold_start/loss",
        Cold_start_gradient="cold_start/grad_norm",
        Cold_start_seconds="cold_start/step_s",
        Cold_start_tokens="cold_start/packed_tokens",
        PRM_training="train_prm/loss",
    ),
)

FIRST = {"rollout/solve_rate": f"{LOGGED_ROWS[0].question}/solved"}
"""TensorBoard opens on all tags in the order of their characters. This metric is written a second time, under a tag
that comes before all others, so that TensorBoard opens on the answer to the first question."""

LIVE_ROW = _row(
    "What are the workers doing?",
    Policy_version="worker/policy_version",
    Groups="worker/running worker/places",
    KV_cache_in_use="worker/kv_usage",
    Requests_that_wait="worker/waiting",
)
