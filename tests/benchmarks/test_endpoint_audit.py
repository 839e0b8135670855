"""The audit of the endpoint: it finds nothing where nothing is wrong, and each fault that is planted in a record."""

import numpy as np
import pytest

from benchmarks.endpoint.attempts import Sampled, ScriptedSampler
from benchmarks.endpoint.faults import planted_faults
from benchmarks.endpoint_audit import Auditor, audited, demo_tokenizer
from learner.types import TrainingSample
from tests.changed import replace

pytestmark = pytest.mark.slow
PROMPT, REPLY, LOGPROBS = (5, 6), (7, 8, 9), (-0.5, -0.25, -1.0)
LOG = [Sampled(PROMPT, REPLY, LOGPROBS, "text")]


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


def sample(token_ids=PROMPT + REPLY, mask=(0, 0, 1, 1, 1), logprobs=(0, 0, *LOGPROBS)):
    trained = np.array(mask, dtype=bool)
    return TrainingSample(
        trajectory_id="t",
        ages=np.where(trained, 0, -1),
        token_ids=np.array(token_ids),
        loss_mask=trained,
        rollout_logprobs=np.array(logprobs, dtype=np.float32),
        advantages=np.zeros(len(mask), dtype=np.float32),
        turn_ids=np.where(trained, 0, -1),
        grammar_spans=(),
        temperature=1.0,
    )


def found(tokenizer, *samples, num_received=1):
    auditor = Auditor(tokenizer)
    auditor.check(LOG, samples, num_received=num_received)
    return auditor.audit


def test_record_of_what_was_sampled_is_clean(tokenizer):
    audit = found(tokenizer, sample())
    assert audit.clean
    assert (audit.sampled, audit.trained) == (3, 3)


@pytest.mark.parametrize(
    "fault",
    [
        {"token_ids": (*PROMPT, 7, 88, 9)},
        {"token_ids": (*PROMPT, 8, 7, 9)},
        {"token_ids": (5, 66, *REPLY)},
        {"mask": (0, 1, 1, 1, 1)},
        {"mask": (0, 0, 1, 1, 0)},
        {"logprobs": (0, 0, -0.5, -0.26, -1.0)},
    ],
)
def test_other_ids_order_prompt_mask_or_log_probs_are_foreign(tokenizer, fault):
    audit = found(tokenizer, sample(**fault))
    assert not audit.clean
    assert audit.foreign == audit.trained


def test_reply_that_is_trained_twice_is_found(tokenizer):
    audit = found(tokenizer, sample(), replace(sample(), branch=1))
    assert (audit.repeated, audit.foreign, audit.clean) == (3, 0, False)


def test_reply_that_is_not_trained_or_that_nobody_got_is_found(tokenizer):
    assert found(tokenizer).replies_untrained == 1
    assert found(tokenizer, sample(), num_received=0).replies_unreceived == 1


async def test_small_audit_finds_nothing_and_counts_what_tokenising_again_would_change(tokenizer):
    audit, _ = await audited(ScriptedSampler(tokenizer, seed=3), tokenizer, num_turns=60, at_once=6)
    assert audit.clean, audit
    assert audit.calls >= 60
    assert 0 < audit.trained < audit.sampled
    assert 0 < audit.wrong_if_text_is_tokenised < audit.trained
    assert 0 < audit.wrong_if_message_is_tokenised < audit.trained


async def test_every_planted_fault_is_caught(tokenizer):
    outcomes = await planted_faults(tokenizer)
    assert [one.fault for one in outcomes if not one.caught] == []
    assert len(outcomes) == 17
