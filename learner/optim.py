"""From the gradients of a step's microbatches to new weights: what the learner asks for, and one process's way."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from learner.types import TrainingSample

Value = TypeVar("Value")
Microbatch = Sequence[TrainingSample]


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
