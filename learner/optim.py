"""From the gradients of a step's microbatches to new weights: what the learner asks for, in one process or in several.

Of several (ranks) each computes a share of a step's microbatches, and DeepSpeed's ZeRO adds their gradients up and
keeps a share of the optimizer on each. Losses carry the whole step's denominator, so gradients are added, never
averaged. DeepSpeed averages over ranks and would divide by accumulation steps: every loss is multiplied by the number
of ranks, and it is told of one step.
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import psutil
import torch
from torch import Tensor

from configs.learner import LearnerConfig
from learner.backbone import Backbone
from learner.packing import share_out
from learner.types import TrainingSample

Value = TypeVar("Value")
Microbatch = Sequence[TrainingSample]

MOMENTS = ("exp_avg", "exp_avg_sq")
PATIENCE = timedelta(minutes=30)
"""How long ranks wait for each other; a machine that loads a large model is slow. The dead are noticed without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which of how many processes this one is."""

    rank: int
    size: int


class Optimizer(Protocol):
    """AdamW over the adapter, in one process or in several that each see a share of the microbatches (ranks).

    A step is: `share`, for each of the share one forward pass and `backward`, `clipped_norm`, and then either
    `update` or `discard`. Every rank makes the same calls in the same order.
    """

    @property
    def writes(self) -> bool:
        """Whether this process writes files and publishes: the first rank does."""
        ...

    def share(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """Those of this rank. An empty one is a pass without samples: the others wait for it."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradient of a microbatch's loss, whose denominator is the whole step's; `last` of this rank's."""
        ...

    def gather(self, value: Value) -> list[Value]:
        """Every rank's value, in the order of ranks."""
        ...

    def clipped_norm(self, max_norm: float) -> float:
        """The norm of the whole step's gradient, the same on every rank, which is then scaled down to `max_norm`."""
        ...

    def update(self, learning_rate: float) -> None:
        """Take the step."""
        ...

    def discard(self) -> None:
        """Forget the gradient; weights and moments stay as they are."""
        ...

    def reset(self, learning_rate: float) -> None:
        """Forget the moments."""
        ...

    def state_dict(self) -> dict[str, object]:
        """The moments as one process has them, in the format of `torch.optim.AdamW`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def whole(self, *, write: bool = False) -> AbstractContextManager[None]:
        """A context in which the adapter's weights are whole on every rank. `write`: they are replaced in it."""
        ...


class LocalAdamW(torch.optim.AdamW):
    """The `Optimizer` of a learner in one process."""

    writes = True

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, weight_decay: float) -> None:
        self._parameters = list(parameters)
        # On a card in one kernel, which needs no copies of the moments meanwhile.
        self._fused = self._parameters[0].is_cuda
        super().__init__(self._parameters, weight_decay=weight_decay, fused=self._fused)

    def share(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        return microbatches

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def clipped_norm(self, max_norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, max_norm))

    def update(self, learning_rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = learning_rate
        self.step()
        self.discard()

    def discard(self) -> None:
        self.zero_grad(set_to_none=True)

    def reset(self, learning_rate: float) -> None:
        self.state.clear()
        for group in self.param_groups:
            group["lr"] = learning_rate

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moments of another device are gone on from, not its way of computing."""
        groups = [group | {"fused": self._fused} for group in state["param_groups"]]
        super().load_state_dict(state | {"param_groups": groups})

    @contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        yield


class MeetingPoint:
    """Where ranks find each other: a socket of the first one's, open before the others learn of it, on the one
    interface that `host` is an address of."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.socket = socket.create_server((host, 0))
        self.port = int(self.socket.getsockname()[1])


def join(ranks: Ranks, address: tuple[str, int], *, device: str, own: MeetingPoint | None, here: str) -> None:
    """Become one of the ranks; returns when all are there. `own` is the meeting point at the first rank, `here` an
    address of this machine, whose interface carries the traffic."""
    os.environ |= {"DS_ACCELERATOR": device, "LOCAL_RANK": "0"}
    # Gloo and NCCL would take the interface of the machine's name, which may be open to the outside.
    os.environ |= {"GLOO_SOCKET_IFNAME": _interface(here), "NCCL_SOCKET_IFNAME": _interface(here)}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    import deepspeed
    import torch.distributed as dist

    # A compiler would make it when the process starts; nothing here calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    listening = own.socket.detach() if own else None
    store = dist.TCPStore(*address, ranks.size, own is not None, timeout=PATIENCE, master_listen_fd=listening)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, timeout=PATIENCE)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)


class ShardedAdamW:
    """The `Optimizer` of a learner that is one of several ranks, over DeepSpeed's ZeRO.

    Moments and weights go out and come in whole, in the format of one process: checkpoints know nothing of ranks.
    """

    def __init__(self, policy: Backbone, config: LearnerConfig, ranks: Ranks) -> None:
        import deepspeed

        self.ranks = ranks
        self._parameters = policy.trainable_parameters()
        self._adapters = policy.adapter_parameters()
        self._has_gradient = False
        adamw = torch.optim.AdamW(self._parameters, lr=0.0, weight_decay=config.weight_decay)
        num_trained = sum(parameter.numel() for parameter in self._parameters)
        self._defaults = adamw.state_dict()["param_groups"]
        self._engine, *_ = deepspeed.initialize(
            model=policy.decoder,
            optimizer=adamw,
            model_parameters=self._parameters,
            config=_settings(config, num_trained),
        )
        policy.decoder = self._engine
        self._zero: Any = self._engine.optimizer
        self._stage = config.zero_stage
        self._begin_moments()

    @property
    def writes(self) -> bool:
        return self.ranks.rank == 0

    def share(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        shares = share_out(microbatches, self.ranks.size)
        longest = max(len(share) for share in shares)
        own = shares[self.ranks.rank]
        return [*own, *[()] * (longest - len(own))]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._has_gradient = True
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.ranks.size, scale_wrt_gas=False)

    def gather(self, value: Value) -> list[Value]:
        values = [value] * self.ranks.size
        torch.distributed.all_gather_object(values, value)
        return values

    def clipped_norm(self, max_norm: float) -> float:
        """DeepSpeed clips when it takes the step, to `learner.max_grad_norm` as well."""
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

    def reset(self, learning_rate: float) -> None:
        self._zero.set_lr(learning_rate)
        for flat in self._flats():
            for moment in self._moments(flat).values():
                moment.zero_()

    def state_dict(self) -> dict[str, object]:
        from deepspeed.utils import safe_get_full_optimizer_state

        step = self._moments(self._flats()[0])["step"]
        groups = [group | {"lr": self._zero.param_groups[0]["lr"]} for group in self._defaults]
        if not float(step):
            return {"state": {}, "param_groups": groups}
        state = {
            index: {"step": step.clone()}
            | {name: safe_get_full_optimizer_state(parameter, name).cpu() for name in MOMENTS}
            for index, parameter in enumerate(self._parameters)
        }
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        self.reset(state["param_groups"][0]["lr"])
        if not state["state"]:
            return
        for flat in self._flats():
            self._moments(flat)["step"].copy_(state["state"][0]["step"])
        for index, parameter in enumerate(self._parameters):
            for name in MOMENTS:
                value = state["state"][index][name].to(parameter.device)
                safe_set_full_optimizer_state(parameter, value, name)

    @contextmanager
    def whole(self, *, write: bool = False) -> Iterator[None]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(self._adapters, modifier_rank=0 if write else None):
            yield
        if write:
            self._zero.refresh_fp32_params()

    def _begin_moments(self) -> None:
        """AdamW makes them in its first step; they are asked for and set before it."""
        for flat in self._flats():
            self._zero.optimizer.state[flat] = {
                "step": torch.tensor(0.0),
                **{name: torch.zeros_like(flat) for name in MOMENTS},
            }
        if self._stage < 3:
            self._zero._lazy_init_hp_params_optimizer_state()

    def _flats(self) -> Sequence[Tensor]:
        """This rank's share of the adapter's weights, as the optimizer sees it."""
        return (
            self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        )

    def _moments(self, flat: Tensor) -> dict[str, Tensor]:
        return self._zero.optimizer.state[flat]


def _settings(config: LearnerConfig, num_trained: int) -> dict[str, object]:
    """What DeepSpeed is told; `num_trained` counts the adapter's weights."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        "zero_optimization": {
            "stage": config.zero_stage,
            # All gradients at once. DeepSpeed reserves the whole bucket on every rank, 1.86 GiB unless it is told.
            "reduce_bucket_size": num_trained,
            # The gradients of an adapter are small: nothing is gained by sending them while others are computed.
            "overlap_comm": False,
            # Its own linear layer rounds differently under autocast.
            "memory_efficient_linear": False,
        },
    }


def _interface(address: str) -> str:
    """The network interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise RuntimeError(f"no network interface of this machine has the address {address}, by which the cluster knows it")
