"""Families of reasoning-gym as custom data sets: its generators make the tasks, and its scorers score them."""

from collections.abc import Iterator
from functools import cached_property

from configs.plugins import OwnCodeError
from envs.types import Task

try:
    import reasoning_gym
    from reasoning_gym.factory import ProceduralDataset
except ModuleNotFoundError as error:
    raise OwnCodeError(f"reasoning-gym is missing ({error}): pip install 'agentflow-ray[reasoning-gym]'") from error


UNSAFE = {
    *("binary_matrix", "composite", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
}
"""Families whose scorers evaluate an answer as Python, and the mixture, which may contain them."""


class ReasoningGym:
    """One family; a recipe names `tasks` as a data set's source and `score` as its scorer."""

    def __init__(self, family: str, *, num_tasks: int, seed: int = 0, **settings: object) -> None:
        """Set up a family with its `settings`; of `num_tasks` draws repeated questions count once.

        Raises OwnCodeError for a family in UNSAFE.
        """
        if family in UNSAFE:
            raise OwnCodeError(f"reasoning-gym's scorer of '{family}' runs answers as Python; use another family")
        self._family = family
        self._settings = {"size": num_tasks, "seed": seed, **settings}

    @cached_property
    def _entries(self) -> ProceduralDataset:
        return reasoning_gym.create_dataset(self._family, **self._settings)

    def tasks(self) -> Iterator[dict[str, object]]:
        """Return rows with id, question, answer and the number of the entry."""
        for number in range(len(self._entries)):
            entry = self._entries[number]
            # Some families accept any solution and name none; their scorer does not read it.
            answer = "any solution" if entry["answer"] in (None, "") else str(entry["answer"])
            yield {"id": number, "question": entry["question"], "answer": answer, "entry": number}

    def score(self, task: Task, answer: str) -> float:
        """Return the family's score of an answer, from 0 to 1."""
        return float(self._entries.score_answer(answer, self._entries[task.metadata["entry"]]))
