import math
from types import MappingProxyType

import numpy as np
import pytest

from learner.types import StepResult
from ray_jobs.run.progress import group_rows, step_trajectories
from rollout.codec import flat_record
from rollout.lifecycle import State
from rollout.types import StepScores
from tests.ray_jobs.view_world import make_batch, make_group, make_group_row

Z = math.sqrt(0.5)
"""One right, one wrong: (1 - 0.5) / 0.7071."""


def shown(group, *, logprobs=None, skipped=None, weight=0.5, facts=MappingProxyType({}), **batch):
    result = StepResult(policy_version=4, metrics={}, skipped=skipped, learner_logprobs=logprobs or {}, **facts)
    found = step_trajectories(
        make_batch(3, **batch), [group], result, scheme="outcome_gated", weights={"lookup": weight}
    )
    return [flat_record(row) for row in found]


def scored_pair():
    """A right attempt of two steps and a wrong one of one step, which share the first state. The rewards there are
    0.905 and 0.145: mean 0.525."""
    group = make_group(0, outcomes=(1.0, 0.0))
    StepScores(raw=((0.9, 0.5), (0.1,)), prm_digest="d").write_to(group)
    return group


def test_advantage_is_the_sum_of_its_parts():
    first, second = shown(scored_pair())
    assert first["outcome_parts"] == pytest.approx([Z, Z], abs=1e-5)
    assert first["process_parts"] == pytest.approx([0.5, 0.0], abs=1e-5)
    assert first["advantages"] == pytest.approx([Z + 0.5, Z], abs=1e-5)
    assert second["advantages"] == pytest.approx([-Z - 0.5], abs=1e-5)
    assert first["step_rewards"] == pytest.approx([0.905, 0.525])
    assert (first["credit"]["scheme"], first["credit"]["weight"]) == ("outcome_gated", 0.5)
    assert first["credit"]["totals"] == pytest.approx({"num": 2, "mean": 0.5, "std": Z})
    assert (first["state_means"], second["state_means"]) == (pytest.approx([0.525, 0.525]), pytest.approx([0.525]))
    assert (first["verdict"], first["trained_as"], first["step"]) == ("trained", 4, 3)


def test_learner_log_probs_of_trained_tokens():
    """Version 1 sampled two tokens of the first turn and version 2 the others; version 1 was too old."""
    group = make_group(0, outcomes=(1.0, 0.0))
    first, second = shown(group, logprobs={"g000000/0": np.array([-2.25, -2.5], dtype=np.float32)}, version_ages={2: 0})
    assert first["turns"][0]["learner_logprobs"] == [None, None, -2.25, -2.5]
    assert "learner_logprobs" not in second["turns"][0]


@pytest.mark.parametrize(("skipped", "state"), [(None, State.TRAINED), ("because", State.REFUSED)])
def test_group_rows_have_their_final_state(skipped, state):
    rows = (make_group_row(0, State.IN_BATCH, 3), make_group_row(1, State.ALL_WRONG, 3))
    result = StepResult(policy_version=4, metrics={}, skipped=skipped)
    first, second = group_rows(make_batch(3, rows=rows), result)
    assert (first.state, first.reason, second.state) == (state, skipped or "", State.ALL_WRONG)
