"""No family of reasoning-gym whose scorer runs an answer as Python can be used."""

import inspect
import re
import sys

import pytest
from reasoning_gym.factory import DATASETS

from configs.plugins import OwnCodeError
from envs.datasets.reasoning_gym import UNSAFE, ReasoningGym


def test_families_that_evaluate_answers_are_refused():
    sources = {name: inspect.getsource(sys.modules[found.__module__]) for name, (found, _) in DATASETS.items()}
    evaluating = {
        name for name, source in sources.items() if re.search(r"(eval|exec|parse_expr|sympify)\(answer", source)
    }
    assert len(evaluating) > 5
    assert evaluating | {"composite"} == UNSAFE
    for family in UNSAFE:
        with pytest.raises(OwnCodeError, match=family):
            ReasoningGym(family, num_tasks=1)
