"""The learner: updates of the policy from batches, and the adapter after each update."""

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from configs.base import Precision
from configs.errors import UserError
from configs.learner import LearnerConfig, ModelConfig
from learner.corrections import off_policy_metrics, off_policy_sums, refusal
from learner.losses import LossInputs, policy_loss
from learner.optim import LocalAdamW, Ranks, ShardedAdamW
from learner.packing import scoring_sample, split_microbatches, trained_logprobs
from learner.policy import Policy, Prepared
from learner.types import Adapter, StepResult, TrainBatch, TrainingSample

PLACEHOLDER = scoring_sample([0, 0])
"""Sample that a rank computes while other ranks still have microbatches."""


class Learner:
    """The policy and its optimizer. One call of `train_step` is one optimizer step and one policy version."""

    def __init__(
        self,
        model_path: Path,
        model: ModelConfig,
        config: LearnerConfig,
        *,
        seed: int,
        ranks: Ranks | None = None,
        base_weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Load the base model and start with an untrained adapter, whose initial weights `seed` decides.

        `ranks` is this process among those that learn together, None if it learns alone. They have called `optim.join`,
        and all make the same calls in the same order. `base_weights` are those of `Backbone`.
        """
        torch.set_num_threads(config.num_threads)
        self.config = config
        self._loss = policy_loss(config.loss)
        self.policy = Policy(model_path, model, config, seed=seed, base_weights=base_weights)
        self.policy_version = 0
        self._step_logprobs: dict[str, np.ndarray] = {}
        parameters = self.policy.trainable_parameters()
        self.optimizer: LocalAdamW | ShardedAdamW = (
            LocalAdamW(parameters, config) if ranks is None else ShardedAdamW(self.policy, config, ranks)
        )
        self.reset_optimizer(config.learning_rate, config.warmup_steps)

    @property
    def writes(self) -> bool:
        return self.optimizer.writes

    def reset_optimizer(self, learning_rate: float, warmup_steps: int = 0, num_steps: int | None = None) -> None:
        """Reset the moments and the schedule. RL must not start with the moments of the cold start.

        The step size rises over `warmup_steps` and, with `num_steps`, falls linearly to zero after that many steps.
        """
        self.optimizer.reset()
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._num_steps = num_steps
        self.num_steps_done = 0
        """Steps since the reset, skipped ones included: the position in the schedule."""

    def set_reference(self) -> None:
        """Make the current policy the reference of the KL term, if the loss has one."""
        if self.config.has_reference:
            self.policy.set_reference()

    def train_step(self, batch: TrainBatch) -> StepResult:
        """Do one RL update and advance the version.

        If the step is refused, the result holds the reason, and the weights do not change.
        """
        started = time.perf_counter()
        self._step_logprobs = {}
        sums = self._accumulate(batch.microbatches, lambda prepared: self._rl_loss(prepared, batch))
        metrics = off_policy_metrics(sums, batch)
        metrics |= {"loss": sums["loss"], "grad_norm": self.optimizer.clipped_norm()}
        skipped = refusal(metrics, batch, guard=self.config.guard)
        self._finish_step(update=skipped is None)
        self.policy_version += 1
        metrics = {f"policy/{name}": value for name, value in metrics.items()}
        metrics |= {
            "policy/skipped": float(skipped is not None),
            "learner/step_s": time.perf_counter() - started,
            "learner/loss_tokens": float(batch.num_loss_tokens),
            "learner/packed_tokens": sums["packed_tokens"],
            "learner/sequence_tokens": sums["sequence_tokens"],
        }
        logprobs: dict[str, np.ndarray] = {}
        for rank_logprobs in self.optimizer.gather(self._step_logprobs):
            logprobs |= rank_logprobs
        logprobs.pop(PLACEHOLDER.name, None)
        return StepResult(
            policy_version=self.policy_version, metrics=metrics, skipped=skipped, learner_logprobs=logprobs
        )

    def imitate_step(self, samples: Sequence[TrainingSample], *, learning_rate: float) -> StepResult:
        """Do one supervised update on the mean negative log-likelihood of the trained tokens, without a new version.

        `learning_rate` is the step size from now on. Raises UserError if the gradient is not finite: unlike samples,
        the same demonstrations would come again.
        """
        started = time.perf_counter()
        self._learning_rate = learning_rate
        num_tokens = sum(sample.num_loss_tokens for sample in samples)

        def loss(prepared: Prepared) -> tuple[Tensor, dict[str, float]]:
            return -self.policy.logprobs(prepared).sum() / num_tokens, {}

        sums = self._accumulate(split_microbatches(samples, self.config.microbatch_tokens), loss)
        grad_norm = self.optimizer.clipped_norm()
        if not math.isfinite(grad_norm):
            raise UserError(f"cold_start/grad_norm must be finite, it is {grad_norm}; lower cold_start.learning_rate")
        self._finish_step(update=True)
        metrics = {
            "cold_start/loss": sums["loss"],
            "cold_start/grad_norm": grad_norm,
            "cold_start/step_s": time.perf_counter() - started,
            "cold_start/packed_tokens": sums["packed_tokens"],
        }
        return StepResult(policy_version=self.policy_version, metrics=metrics)

    def adapter(self, precision: Precision = "float32") -> Adapter:
        """Return the current adapter, rounded from float32 to `precision`. Raises UserError if the ranks differ."""
        data = safetensors.torch.save(self.policy.adapter_state(getattr(torch, precision)))
        digest = hashlib.sha256(data).hexdigest()
        if len(digests := set(self.optimizer.gather(digest))) > 1:
            raise UserError(f"the learner's ranks hold {len(digests)} different adapters; resume the run")
        return Adapter(policy_version=self.policy_version, data=data, digest=digest)

    def load_adapter(self, adapter: Adapter) -> None:
        self.policy.load_adapter_state(safetensors.torch.load(adapter.data))
        self.optimizer.take_weights()
        self.policy_version = adapter.policy_version

    def _rl_loss(self, prepared: Prepared, batch: TrainBatch) -> tuple[Tensor, dict[str, float]]:
        rows = prepared.samples
        learner = self.policy.logprobs(prepared)
        self._step_logprobs |= trained_logprobs(rows, learner)
        rollout, advantages, mask, turn_ids, ages = (
            pad_sequence([torch.from_numpy(getattr(row, name)) for row in rows], batch_first=True).to(learner.device)
            for name in ("rollout_logprobs", "advantages", "loss_mask", "turn_ids", "ages")
        )
        ref = None
        if self.config.has_reference:
            with self.policy.as_reference():
                ref = self.policy.logprobs(prepared)
        inputs = LossInputs(
            learner_logprobs=learner,
            rollout_logprobs=rollout,
            advantages=advantages,
            loss_mask=mask,
            num_loss_tokens=batch.num_loss_tokens,
            num_trajectories=batch.num_trajectories,
            correction=self.config.correction,
            correction_band=self.config.correction_band,
            ages=ages,
            turn_ids=turn_ids,
            row_weights=torch.tensor([[row.weight] for row in rows], device=learner.device),
            ref_logprobs=ref,
        )
        output = self._loss(inputs)
        return output.loss, output.metrics | off_policy_sums(learner, rollout, mask, ages)

    def _accumulate(
        self,
        microbatches: Sequence[Sequence[TrainingSample]],
        loss_of: Callable[[Prepared], tuple[Tensor, dict[str, float]]],
    ) -> dict[str, float]:
        """Compute the gradient of all microbatches, and return the sums of losses and metrics over all ranks."""
        sums: dict[str, float] = defaultdict(float)
        share = self.optimizer.share(microbatches)
        for number, (rows, prepared) in enumerate(zip(share, self._prepared(share), strict=True), start=1):
            loss, metrics = loss_of(prepared)
            self.optimizer.backward(loss if rows else 0 * loss, last=number == len(share))
            if not rows:
                continue
            for name, value in metrics.items():
                sums[name] += value
            sums["loss"] += float(loss.detach())
            sums["packed_tokens"] += len(prepared.row.token_ids)
            sums["sequence_tokens"] += sum(len(row.token_ids) for row in rows)
        total: dict[str, float] = defaultdict(float)
        # Added in the order of ranks, so that all ranks get identical numbers and make the same decisions.
        for rank_sums in self.optimizer.gather(dict(sums)):
            for name, value in rank_sums.items():
                total[name] += value
        return total

    def _prepared(self, share: Sequence[Sequence[TrainingSample]]) -> Iterator[Prepared]:
        """Prepare each microbatch in a thread while the previous one is computed."""
        with ThreadPoolExecutor(max_workers=1) as thread:
            ahead = [thread.submit(self.policy.prepare, rows or [PLACEHOLDER]) for rows in share[:1]]
            for rows in share[1:]:
                ahead.append(thread.submit(self.policy.prepare, rows or [PLACEHOLDER]))
                yield ahead.pop(0).result()
            yield from (last.result() for last in ahead)

    def _finish_step(self, *, update: bool) -> None:
        """Advance the schedule, and update the weights or discard the gradient."""
        self.num_steps_done += 1
        if not update:
            self.optimizer.discard()
            return
        scale = min(1.0, self.num_steps_done / self._warmup_steps) if self._warmup_steps else 1.0
        if self._num_steps is not None:
            scale *= max(0.0, 1 - (self.num_steps_done - 1) / self._num_steps)
        self.optimizer.update(self._learning_rate * scale)
