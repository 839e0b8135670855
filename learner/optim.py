"""The optimizer of the learner, in one process or in several.

Each of several processes (ranks) computes a share of a step's microbatches; DeepSpeed's ZeRO stage 1 combines their
gradients and keeps a share of the moments on each rank. Losses have the whole step's denominator, so gradients must be
added. DeepSpeed averages over ranks and divides by accumulation steps: every loss is multiplied by the number of ranks,
and the number of accumulation steps is one.
"""

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from configs.learner import LearnerConfig
from learner.backbone import Backbone
from learner.packing import num_distinct_tokens
from learner.types import TrainingSample

Value = TypeVar("Value")
Microbatch = Sequence[TrainingSample]

WEIGHT_DECAY = 0.0
MAX_GRAD_NORM = 1.0
"""Norm to which a longer gradient is scaled down."""
MOMENTS = ("exp_avg", "exp_avg_sq")
PATIENCE = timedelta(minutes=30)
"""Ranks wait for each other while they load a large model. Dead ones are noticed earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The number of this process and the number of all processes that learn together."""

    rank: int
    size: int


class LocalAdamW(torch.optim.AdamW):
    """AdamW over the adapter of a learner in one process.

    A step consists of `share`, one forward pass and `backward` for each of these microbatches, `clipped_norm`, and then
    `update` or `discard`. `ShardedAdamW` has the same methods, which every rank calls in the same order.
    """

    writes = True
    """Whether this process writes files and publishes, as the first rank does."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], config: LearnerConfig) -> None:
        self._parameters = list(parameters)
        # A fused kernel on a card needs no temporary copies of the moments.
        self._fused = self._parameters[0].is_cuda
        betas, eps = config.adam_betas, config.adam_eps
        super().__init__(self._parameters, betas=betas, eps=eps, weight_decay=WEIGHT_DECAY, fused=self._fused)

    def share(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Return the microbatches of this rank. An empty one is a pass for which other ranks wait."""
        return microbatches

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a microbatch's loss, of which the `last` one is this rank's last."""
        loss.backward()

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks in order."""
        return [value]

    def clipped_norm(self) -> float:
        """Return the norm of the whole step's gradient, the same on every rank, and clip it."""
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM))

    def update(self, learning_rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.step()
        self.discard()

    def discard(self) -> None:
        """Drop the gradient without changing weights and moments."""
        self.zero_grad(set_to_none=True)

    def reset(self) -> None:
        """Set the moments to zero."""
        self.state.clear()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load moments of any device, and keep this device's choice of kernel."""
        groups = [group | {"fused": self._fused} for group in state["param_groups"]]
        super().load_state_dict(state | {"param_groups": groups})

    def take_weights(self) -> None:
        """Continue with weights of the adapter that were changed."""


def join(ranks: Ranks, address: tuple[str, int], *, device: str, own: socket.socket | None, here: str) -> None:
    """Join the other ranks at the host and port of `address`, and return when all have joined.

    `own` is its listening socket, at the first rank. The traffic uses the network interface of this machine with the
    address `here`.
    """
    os.environ |= {"DS_ACCELERATOR": device, "LOCAL_RANK": "0"}
    names = [name for name, given in psutil.net_if_addrs().items() if any(entry.address == here for entry in given)]
    if not names:
        raise RuntimeError(f"no network interface has the address {here}, by which the cluster knows this machine")
    # By default Gloo and NCCL use the interface of the machine's name, which may be reachable from outside.
    os.environ |= {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": names[0]}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    import torch.distributed as dist

    # DeepSpeed would compile this operation at the start of the process. It is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    listening = own.detach() if own else None
    store = dist.TCPStore(*address, ranks.size, own is not None, timeout=PATIENCE, master_listen_fd=listening)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=PATIENCE)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


class ShardedAdamW:
    """AdamW over the adapter of a learner that is one of several ranks, over DeepSpeed's ZeRO.

    Moments are saved and loaded whole, so that checkpoints do not depend on the number of ranks.
    """

    def __init__(self, policy: Backbone, config: LearnerConfig, ranks: Ranks) -> None:
        import deepspeed

        self.ranks = ranks
        self._parameters = policy.trainable_parameters()
        self._has_gradient = False
        betas, eps = config.adam_betas, config.adam_eps
        adamw = torch.optim.AdamW(self._parameters, lr=0.0, betas=betas, eps=eps, weight_decay=WEIGHT_DECAY)
        self._defaults = adamw.state_dict()["param_groups"]
        self._engine, *_ = deepspeed.initialize(
            model=policy.decoder,
            optimizer=adamw,
            model_parameters=self._parameters,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": MAX_GRAD_NORM,
                "zero_allow_untested_optimizer": True,
                "steps_per_print": None,
                "zero_optimization": {
                    "stage": 1,
                    # All gradients fit. DeepSpeed reserves the whole bucket on every rank, 1.86 GiB by default.
                    "reduce_bucket_size": sum(parameter.numel() for parameter in self._parameters),
                    # The gradients of an adapter are small: overlapping their transfer gains nothing.
                    "overlap_comm": False,
                    # DeepSpeed's linear layer rounds differently under autocast.
                    "memory_efficient_linear": False,
                },
            },
        )
        policy.decoder = self._engine
        self._zero: Any = self._engine.optimizer
        # AdamW creates its moments in the first step. They are read and set before.
        for flat in self._flats():
            self._zero.optimizer.state[flat] = {
                "step": torch.tensor(0.0),
                **{name: torch.zeros_like(flat) for name in MOMENTS},
            }
        self._zero._lazy_init_hp_params_optimizer_state()

    @property
    def writes(self) -> bool:
        return self.ranks.rank == 0

    def share(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        # Every rank deals in the same order, so that ranks that synchronize in a pass have one of similar size.
        largest_first = sorted(microbatches, key=num_distinct_tokens, reverse=True)
        share = largest_first[self.ranks.rank :: self.ranks.size]
        num_passes = -(-len(microbatches) // self.ranks.size)
        return [*share, *[()] * (num_passes - len(share))]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._has_gradient = True
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.ranks.size, scale_wrt_gas=False)

    def gather(self, value: Value) -> list[Value]:
        values = [value] * self.ranks.size
        torch.distributed.all_gather_object(values, value)
        return values

    def clipped_norm(self) -> float:
        """DeepSpeed clips when it takes the step."""
        from deepspeed.utils import safe_get_full_grad

        if not self._has_gradient:
            return 0.0
        squares = [safe_get_full_grad(parameter).square().sum() for parameter in self._parameters]
        return float(torch.stack(squares).sum().sqrt())

    def update(self, learning_rate: float) -> None:
        self._zero.set_lr(learning_rate)
        self._engine.step()
        self._has_gradient = False

    def discard(self) -> None:
        self._zero.zero_grad()
        for group in self._zero.averaged_gradients:
            self._zero.averaged_gradients[group] = None
        self._has_gradient = False

    def reset(self) -> None:
        for flat in self._flats():
            for moment in self._zero.optimizer.state[flat].values():
                moment.zero_()

    def state_dict(self) -> dict[str, object]:
        """Return the moments of all ranks, in the format of `torch.optim.AdamW`."""
        from deepspeed.utils import safe_get_full_optimizer_state

        step = self._zero.optimizer.state[self._flats()[0]]["step"]
        if not float(step):
            return {"state": {}, "param_groups": self._defaults}
        state = {
            index: {"step": step.clone()}
            | {name: safe_get_full_optimizer_state(parameter, name).cpu() for name in MOMENTS}
            for index, parameter in enumerate(self._parameters)
        }
        return {"state": state, "param_groups": self._defaults}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        self.reset()
        if not state["state"]:
            return
        for flat in self._flats():
            self._zero.optimizer.state[flat]["step"].copy_(state["state"][0]["step"])
        for index, parameter in enumerate(self._parameters):
            for name in MOMENTS:
                value = state["state"][index][name].to(parameter.device)
                safe_set_full_optimizer_state(parameter, value, name)

    def take_weights(self) -> None:
        self._zero.refresh_fp32_params()

    def _flats(self) -> Sequence[Tensor]:
        """Return this rank's share of the adapter's weights, as the optimizer has it."""
        shares: Sequence[Tensor] = self._zero.single_partition_of_fp32_groups
        return shares
