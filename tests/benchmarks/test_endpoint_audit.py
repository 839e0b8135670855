"""The audit of the endpoint: clean where nothing is wrong, and each planted fault is found."""

import numpy as np
import pytest

from benchmarks.endpoint_audit import Audit, Sampled, ScriptedSampler, audit
from ray_jobs.run.model_folder import ensure_demo_model
from tests.changed import replace
from tests.learner import tiny

PROMPT, REPLY, LOGPROBS = (5, 6), (7, 8, 9), (-0.5, -0.25, -1.0)


def sample(token_ids=PROMPT + REPLY, mask=(0, 0, 1, 1, 1), logprobs=(0, 0, *LOGPROBS)):
    return replace(tiny.sample(token_ids, np.flatnonzero(mask)), rollout_logprobs=np.array(logprobs, dtype=np.float32))


def checked(*samples, num_received=1):
    result = Audit()
    result.check([Sampled(PROMPT, REPLY, LOGPROBS)], samples, num_received=num_received)
    return result


def test_equal_records_are_clean():
    result = checked(sample())
    assert (result.clean, result.sampled, result.trained) == (True, 3, 3)


@pytest.mark.parametrize(
    "fault",
    [
        {"token_ids": (*PROMPT, 7, 88, 9)},
        {"token_ids": (5, 66, *REPLY)},
        {"mask": (0, 1, 1, 1, 1)},
        {"logprobs": (0, 0, -0.5, -0.26, -1.0)},
    ],
)
def test_other_ids_prompt_mask_or_logprobs_are_foreign(fault):
    result = checked(sample(**fault))
    assert (result.clean, result.foreign) == (False, result.trained)


def test_repeated_missing_and_unreceived_replies_are_found():
    assert checked(sample(), sample()).repeated == 3
    assert checked().untrained_replies == 1
    assert checked(sample(), num_received=0).unreceived_replies == 1


@pytest.mark.slow
async def test_small_audit_is_clean():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    result = await audit(ScriptedSampler(tokenizer, seed=3), tokenizer, num_turns=60, at_once=6)
    assert result.clean, result
    assert result.calls >= 60
    assert 0 < result.trained < result.sampled
