"""The demo model for the tests with the real engine."""

import pytest
from real_engine import build_learner, without_ends


@pytest.fixture(scope="module")
def model_path():
    from ray_jobs.run.model_folder import ensure_demo_model

    return ensure_demo_model()


@pytest.fixture(scope="module")
def learner(model_path):
    return build_learner(model_path)


@pytest.fixture(scope="module")
def chat(model_path):
    from rollout.agent.agent import build_chat

    return build_chat(model_path)


@pytest.fixture(scope="module")
def prompt(chat):
    return chat.prompt("You are helpful. " * 12, "What is 2 + 3?")


@pytest.fixture
def endless(monkeypatch):
    without_ends(monkeypatch)
