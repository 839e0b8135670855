"""The learner: batches to updates of the policy, and the adapter that each update leaves behind."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.learner import LearnerConfig
from configs.model import ModelConfig
from learner.losses import LossOutput, dapo_loss, flow_grpo_loss, grpo_loss
from learner.packing import pack, split_microbatches
from learner.policy import Policy
from learner.types import Adapter, StepResult, TrainBatch, TrainingSample

_PER_TOKEN_METRICS = ("clip_high", "clip_low", "ratio", "logprob_gap_abs", "mismatch_k3", "kl_ref_k3")


class Learner:
    """Holds the policy and its optimizer. One call of `train_step` is one optimizer step, one version.

    `off_policy` switches the truncated importance weights on; without it a batch is taken to be sampled by
    the very weights it updates.
    """

    def __init__(
        self,
        model_path: Path,
        model: ModelConfig,
        config: LearnerConfig,
        *,
        off_policy: bool,
        seed: int,
        mixed_precision: bool = True,
    ) -> None:
        torch.set_num_threads(config.num_threads)
        self.config = config
        self._off_policy = off_policy
        self.policy = Policy(model_path, model, device=config.device, seed=seed, mixed_precision=mixed_precision)
        self.policy_version = 0
        self.reset_optimizer(config.learning_rate, config.warmup_steps)

    def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0, num_steps: int | None = None) -> None:
        """Forget the moments: the cold start's have no meaning for RL. The step size rises over `warmup_steps` and,
        with `num_steps`, falls in a straight line that is zero after so many steps."""
        self.optimizer = torch.optim.AdamW(
            self.policy.trainable_parameters(), lr=learning_rate, weight_decay=self.config.weight_decay
        )
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._num_steps = num_steps
        self._optimizer_steps = 0

    def train_step(self, batch: TrainBatch) -> StepResult:
        """One RL update. A batch without loss tokens changes nothing but the version, and says so."""
        started = time.perf_counter()
        staleness = self.policy_version - batch.oldest_policy_version
        sums = self._accumulate(batch.microbatches, lambda rows: self._rl_loss(rows, batch))
        grad_norm = self._update() if batch.num_loss_tokens else 0.0
        self.policy_version += 1
        elapsed = time.perf_counter() - started
        tokens = max(batch.num_loss_tokens, 1)
        metrics = {f"policy/{name}": sums[name] / tokens for name in _PER_TOKEN_METRICS if name in sums}
        metrics |= {
            "policy/loss": sums["loss"],
            "policy/effective_sample_size": sums["weight"] ** 2 / max(tokens * sums["weight_squared"], 1e-12),
            "policy/grad_norm": grad_norm,
            "policy/staleness_max": float(staleness),
            "learner/step_s": elapsed,
            "learner/loss_tokens": float(batch.num_loss_tokens),
            "learner/packed_tokens": sums["packed_tokens"],
            "learner/sequence_tokens": sums["sequence_tokens"],
        }
        return StepResult(policy_version=self.policy_version, metrics=metrics)

    def imitate_step(self, samples: Sequence[TrainingSample], *, learning_rate: float | None = None) -> StepResult:
        """One supervised update: mean negative log-likelihood of the trained tokens. No new version.

        `learning_rate` is the step size from now on, None leaves it as it is.
        """
        started = time.perf_counter()
        self._learning_rate = self._learning_rate if learning_rate is None else learning_rate
        num_tokens = sum(sample.num_loss_tokens for sample in samples)

        def loss(rows: Sequence[TrainingSample]) -> LossOutput:
            return LossOutput(loss=-self.policy.logprobs(rows).sum() / num_tokens, metrics={})

        sums = self._accumulate(split_microbatches(samples, self.config.microbatch_tokens), loss)
        grad_norm = self._update()
        metrics = {
            "cold_start/loss": sums["loss"],
            "cold_start/grad_norm": grad_norm,
            "cold_start/step_s": time.perf_counter() - started,
            "cold_start/packed_tokens": sums["packed_tokens"],
        }
        return StepResult(policy_version=self.policy_version, metrics=metrics)

    def adapter(self) -> Adapter:
        """The current adapter as bytes, with their digest."""
        import safetensors.torch

        data = safetensors.torch.save(self.policy.adapter_state())
        return Adapter(policy_version=self.policy_version, data=data, digest=hashlib.sha256(data).hexdigest())

    def load_adapter(self, adapter: Adapter) -> None:
        """Continue from an adapter. Raises ValueError when its bytes are not what its digest says."""
        import safetensors.torch

        digest = hashlib.sha256(adapter.data).hexdigest()
        if digest != adapter.digest:
            raise ValueError(f"adapter v{adapter.policy_version}: digest {digest[:12]} != {adapter.digest[:12]}")
        self.policy.load_adapter_state(safetensors.torch.load(adapter.data))
        self.policy_version = adapter.policy_version

    def _rl_loss(self, rows: Sequence[TrainingSample], batch: TrainBatch) -> LossOutput:
        learner_logprobs = self.policy.logprobs(rows)
        width = learner_logprobs.shape[1]
        rollout, advantages, mask, turn_ids = (
            _padded([getattr(row, name) for row in rows], width, learner_logprobs.device)
            for name in ("rollout_logprobs", "advantages", "loss_mask", "turn_ids")
        )
        correction: dict[str, Any] = {}
        if self._off_policy:
            # One optimizer step per batch: the proximal policy is the learner itself, before the step.
            correction["proximal_logprobs"] = learner_logprobs.detach()
            correction["max_importance_weight"] = self.config.max_importance_weight
        tensors = (learner_logprobs, rollout, advantages, mask)
        low, high = self.config.clip_low, self.config.clip_high
        if self.config.objective == "grpo":
            return grpo_loss(
                *tensors, num_trajectories=batch.num_trajectories, clip_low=low, clip_high=low, **correction
            )
        if self.config.objective == "flow_grpo":
            return flow_grpo_loss(
                *tensors,
                num_trajectories=batch.num_trajectories,
                turn_ids=turn_ids,
                ref_logprobs=self._ref_logprobs(rows),
                kl_weight=self.config.kl_weight,
                clip_low=low,
                clip_high=low,
                **correction,
            )
        return dapo_loss(*tensors, num_loss_tokens=batch.num_loss_tokens, clip_low=low, clip_high=high, **correction)

    def _ref_logprobs(self, rows: Sequence[TrainingSample]) -> Tensor | None:
        """Log-probs of the reference, the untouched base model; None where the KL term has no weight."""
        if not self.config.kl_weight:
            return None
        with self.policy.without_adapter():
            return self.policy.logprobs(rows)

    def _accumulate(
        self,
        microbatches: Sequence[Sequence[TrainingSample]],
        loss_of: Callable[[Sequence[TrainingSample]], LossOutput],
    ) -> dict[str, float]:
        """Backward through every microbatch; sums of losses and metrics."""
        sums: dict[str, float] = defaultdict(float)
        for rows in microbatches:
            output = loss_of(rows)
            output.loss.backward()
            for name, value in output.metrics.items():
                sums[name] += value
            sums["loss"] += float(output.loss.detach())
            sums["packed_tokens"] += len(pack(rows).token_ids)
            sums["sequence_tokens"] += sum(len(row.token_ids) for row in rows)
        return sums

    def _update(self) -> float:
        """Clip, step, clear; returns the gradient norm before clipping."""
        self._optimizer_steps += 1
        scale = min(1.0, self._optimizer_steps / self._warmup_steps) if self._warmup_steps else 1.0
        if self._num_steps is not None:
            scale *= max(0.0, 1 - (self._optimizer_steps - 1) / self._num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * scale
        norm = torch.nn.utils.clip_grad_norm_(
            self.policy.trainable_parameters(), self.config.max_grad_norm, error_if_nonfinite=True
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm)


def _padded(rows: list, width: int, device: torch.device) -> Tensor:
    """Stack 1-D arrays into `[B, width]`, zeros (False) on the right."""
    tensors = [torch.from_numpy(row) for row in rows]
    result = torch.zeros(len(rows), width, dtype=tensors[0].dtype)
    for index, tensor in enumerate(tensors):
        result[index, : len(tensor)] = tensor
    return result.to(device)
