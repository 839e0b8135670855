"""What asynchronous runs promise of stale tokens: the guard refuses a policy that is elsewhere, the clip binds."""

import torch
from torch import Tensor

from benchmarks.promised.promise import Measured, Promise
from configs.learner import (
    CorrectionConfig,
    DapoConfig,
    GuardConfig,
    IcepopConfig,
    NoCorrectionConfig,
    SequenceRejectConfig,
    TisConfig,
)
from learner.corrections import off_policy_metrics, off_policy_sums, refusal
from learner.losses import LossInputs, policy_loss
from learner.types import TrainBatch

DECIDED_SHARE = 0.85
SHAPE = (32, 100)


def _planner_tokens(generator: torch.Generator) -> Tensor:
    """Log-probs as a planner's JSON has them: most tokens decided by the grammar, the others anywhere."""
    free = torch.rand(SHAPE, generator=generator) > DECIDED_SHARE
    return torch.where(free, -3 * torch.rand(SHAPE, generator=generator) - 0.05, -1e-5)


def _refused(learner: Tensor, rollout: Tensor) -> bool:
    ones = torch.ones(SHAPE, dtype=torch.bool)
    count = rollout.numel()
    batch = TrainBatch(microbatches=(), num_loss_tokens=count, num_trajectories=32, num_masked_tokens=0, max_age=2)
    metrics = off_policy_metrics(off_policy_sums(learner, rollout, ones, 2 * ones), batch)
    return refusal(metrics | {"loss": 0.0, "grad_norm": 1.0}, batch, GuardConfig()) is not None


def guard(seed: int) -> Measured:
    """Policies that share nothing with the sampler are refused; staleness as the demo has it is not."""
    generator = torch.Generator().manual_seed(seed)
    refused, healthy = [], []
    for _ in range(20):
        rollout = _planner_tokens(generator)
        free = rollout < -0.01
        coin = torch.where(torch.rand(SHAPE, generator=generator) < 0.5, -10.0, 10.0)
        other = _planner_tokens(generator)
        refused += [_refused(rollout + free * shift, rollout) for shift in (torch.tensor(-10.0), coin)]
        refused += [_refused(rollout - 10, rollout), _refused(other, rollout)]
        # k3 of 0.3 per choice token, the widest step of the demo: a normal log ratio with this deviation.
        noise = 0.7 * torch.randn(SHAPE, generator=generator)
        healthy.append(not _refused(rollout + free * (noise - 0.245), rollout))
    text = f"refused {sum(refused)} of {len(refused)} far policies, passed {sum(healthy)} of {len(healthy)} healthy"
    return Measured(text, all(refused) and all(healthy))


def trust_region(seed: int) -> Measured:
    """The share of the gradient that the default clip takes away, under every correction: from tokens that rose in
    attempts better than their siblings, and from tokens that fell in worse ones."""
    generator = torch.Generator().manual_seed(seed)
    rollout = _planner_tokens(generator)
    moved = rollout + 0.5 * torch.randn(SHAPE, generator=generator)
    advantages = torch.randn(32, 1, generator=generator)
    taken = {}
    for correction in (TisConfig(), IcepopConfig(), SequenceRejectConfig(), NoCorrectionConfig()):

        def gradient(loss: DapoConfig, correction: CorrectionConfig = correction) -> Tensor:
            learner = moved.clone().requires_grad_()
            inputs = LossInputs(
                learner_logprobs=learner,
                rollout_logprobs=rollout,
                advantages=advantages,
                loss_mask=torch.ones(SHAPE, dtype=torch.bool),
                num_loss_tokens=learner.numel(),
                num_trajectories=len(learner),
                correction=correction,
                ages=torch.ones(SHAPE, dtype=torch.long),
            )
            policy_loss(loss)(inputs).loss.backward()
            return learner.grad

        free, bound = gradient(DapoConfig(clip_low=0.999, clip_high=1000.0)), gradient(DapoConfig())
        taken[correction.type] = [
            float((free - bound)[side].abs().sum() / free[side].abs().sum())
            for side in (advantages[:, 0] > 0, advantages[:, 0] < 0)
        ]
    text = ", ".join(f"{kind} {100 * up:.0f}% and {100 * down:.0f}%" for kind, (up, down) in taken.items())
    bound_on_both = all(share > 0 for sides in taken.values() for share in sides)
    return Measured(f"gradient taken by the clip from better and from worse attempts: {text}", bound_on_both)


PROMISES = [
    Promise(
        name="off-policy-guard",
        said="A batch of a policy that is far from its sampler is skipped",
        where="docs/algorithms.md",
        measure=guard,
    ),
    Promise(
        name="trust-region",
        said="The clip takes the gradient of stale tokens that moved too far, under every correction",
        where="docs/algorithms.md",
        measure=trust_region,
    ),
]
