"""A critic without labels: the probability that an attempt ends right, read from the policy's own hidden states."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from learner.packing import NumberedSequence, pack, split_microbatches
from learner.policy import Policy
from rollout.types import Group, ids_of

FORGETTING = 0.9
"""What an earlier train step weighs, of the weight of the one after it: the states change with the policy."""
RIDGE = 1e-3
"""Penalty of the weights, relative to the mean square of a component of the states."""


class Critic:
    """Least squares of the outcome on the policy's last hidden state at the end of each prompt, with forgetting.

    The states are those that the policy decides from, so they hold what it has seen and how many steps are left. They
    are not trained for this, and nothing reaches the policy's weights. The regression has a closed form: equal states
    and outcomes give equal values, in any process.
    """

    def __init__(self, policy: Policy, *, microbatch_tokens: int) -> None:
        self._policy = policy
        self._microbatch_tokens = microbatch_tokens
        size = policy.hidden_size + 1
        self._moments = torch.zeros(size, size + 1, dtype=torch.float64)
        """Sums of products of the states, with a constant 1, with each other and, in the last column, with outcomes."""

    def values(self, groups: Sequence[Group]) -> Mapping[str, tuple[float, ...]]:
        """Return the value before each planner turn in [0, 1], by the trajectory's id; then learn from the outcomes.

        Values of a batch are computed before the critic learns from it, so that no attempt is judged by itself.
        """
        attempts = [attempt for group in groups for attempt in group.trajectories if attempt.total is not None]
        turns = [(attempt, turn) for attempt in attempts for turn in attempt.planner_turns]
        states = self._states([ids_of(turn.prompt).astype(np.int64) for _, turn in turns])
        size = len(self._moments)
        products, targets = self._moments[:, :size], self._moments[:, size]
        penalty = RIDGE * products.diagonal().mean().clamp(min=1e-9) * torch.eye(size, dtype=torch.float64)
        weights = torch.linalg.solve(products + penalty, targets)
        values = iter((states @ weights).clamp(0, 1).tolist())
        outcomes = torch.tensor([attempt.outcome for attempt, _ in turns], dtype=torch.float64)
        new = states.T @ torch.cat((states, outcomes[:, None]), dim=1)
        self._moments = FORGETTING * self._moments + new
        return {attempt.id: tuple(next(values) for _ in attempt.planner_turns) for attempt in attempts}

    def state_dict(self) -> Tensor:
        return self._moments

    def load_state_dict(self, moments: Tensor) -> None:
        self._moments = moments

    @torch.no_grad()
    def _states(self, prompts: Sequence[np.ndarray]) -> Tensor:
        """Return the states `[len(prompts), H + 1]` in float64 on the CPU; the last component is 1."""
        rows = [NumberedSequence(index, token_ids) for index, token_ids in enumerate(prompts)]
        states = torch.ones(len(rows), self._policy.hidden_size + 1, dtype=torch.float64)
        for batch in split_microbatches(rows, self._microbatch_tokens):
            packed = pack(batch)
            last = self._policy.tensor(np.array([nodes[-1] for nodes in packed.node_of]))
            hidden = self._policy.hidden_states(packed)[last].double().cpu()
            states[[row.index for row in batch], :-1] = hidden
        return states
