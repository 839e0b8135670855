"""What stands together where metrics are looked at, under the question that it answers: for TensorBoard and Grafana."""

from dataclasses import dataclass


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
