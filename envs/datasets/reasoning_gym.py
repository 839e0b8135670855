"""A family of reasoning-gym as a task set of one's own: its generator makes the tasks, and its scorer scores them."""

from collections.abc import Iterator
from functools import cached_property

from configs.plugins import OwnCodeError
from envs.datasets.split import question_key
from envs.types import Task

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS, ProceduralDataset
except ModuleNotFoundError as error:
    raise OwnCodeError(f"reasoning-gym is missing ({error}): pip install 'agentflow-ray[reasoning-gym]'") from error


class ReasoningGym:
    """`tasks` and `score` are what a recipe names as a data set's source and scorer."""

    def __init__(self, family: str, *, num_tasks: int, seed: int = 0, **settings: object) -> None:
        """`num_tasks` are drawn, of which each question is kept once; `settings` are the family's own.

        Raises OwnCodeError for a family or a setting that there is not.
        """
        if family not in DATASETS:
            raise OwnCodeError(f"reasoning-gym {reasoning_gym.__version__} has no family '{family}'")
        self._family = family
        self._settings = {"size": num_tasks, "seed": seed, **settings}

    @cached_property
    def _entries(self) -> ProceduralDataset:
        try:
            return reasoning_gym.create_dataset(self._family, **self._settings)
        except (TypeError, AssertionError) as error:
            raise OwnCodeError(f"reasoning-gym's '{self._family}' does not take {self._settings}: {error}") from error

    def tasks(self) -> Iterator[dict[str, object]]:
        """Tables of question, answer, id and the entry's number. The question's hash says what a task is for, so that
        no question is both trained on and held out."""
        seen: set[str] = set()
        for number in range(len(self._entries)):
            entry = self._entries[number]
            key = question_key(entry["question"])
            if key not in seen:
                seen.add(key)
                yield {"id": number, "question": entry["question"], "answer": entry["answer"], "entry": number}

    def score(self, task: Task, answer: str) -> float:
        """What the family itself says of an answer, from 0 to 1."""
        return float(self._entries.score_answer(answer, self._entries[task.metadata["entry"]]))
