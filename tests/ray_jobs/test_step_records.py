import math
from types import MappingProxyType

import numpy as np
import pytest

from learner.types import StepResult
from ray_jobs.run.progress import group_rows, step_trajectories
from rollout.codec import flat_record
from rollout.lifecycle import State
from tests.ray_jobs.view_world import make_batch, make_group, make_group_row

Z = math.sqrt(0.5)
"""One right, one wrong: (1 - 0.5) / 0.7071."""


def shown(group, *, logprobs=None, skipped=None, facts=MappingProxyType({}), **batch):
    result = StepResult(policy_version=4, metrics={}, skipped=skipped, learner_logprobs=logprobs or {}, **facts)
    found = step_trajectories(make_batch(3, **batch), [group], result, scheme="outcome")
    return [flat_record(row) for row in found]


def test_record_of_a_trained_attempt_has_its_advantage_and_what_it_is_made_of():
    group = make_group(0, outcomes=(1.0, 0.0))
    group.trajectories[0].turns[1].num_candidates = 16
    first, second = shown(group)
    assert first["advantages"] == pytest.approx([Z, Z], abs=1e-5)
    assert second["advantages"] == pytest.approx([-Z], abs=1e-5)
    assert first["credit"]["scheme"] == "outcome"
    assert first["credit"]["totals"] == pytest.approx({"num": 2, "mean": 0.5, "std": Z})
    assert (first["verdict"], first["trained_as"], first["step"]) == ("trained", 4, 3)
    assert (first["num_candidates"], second.get("num_candidates")) == ([1, 16], None)


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
