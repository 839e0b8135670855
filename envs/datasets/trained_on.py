"""Which problems training has met: those of the mix's data sets of finite size."""

from collections.abc import Iterable
from pathlib import Path

from configs.envs import EnvsConfig
from envs.datasets.families import FAMILIES
from envs.datasets.registry import load_tasks
from envs.datasets.split import question_key
from envs.types import Task


def never_trained_on(tasks: Iterable[Task], envs: EnvsConfig) -> list[Task]:
    """The tasks that training on the mix of `envs` cannot meet, in their order. Generated families ask no question that
    anybody else asks. Raises ValueError and OSError as `load_tasks`."""
    path = Path(envs.data_path) if envs.data_path else None
    names = [name for name, share in envs.mix.items() if share > 0 and name not in FAMILIES]
    met = {_key(task) for name in names for task in load_tasks(name, split="train", count=None, seed=0, path=path)}
    return [task for task in tasks if _key(task) not in met]


def _key(task: Task) -> str:
    """The same for the same problem: a hand in whatever order, a question but for case, spacing and punctuation."""
    if task.dataset == "game24":
        return f"game24 {sorted(map(int, task.answer.split()))}"
    return question_key(task.question)
