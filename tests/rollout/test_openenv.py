"""A server of OpenEnv, played through verifiers: its observations are asked, its summed rewards are the score."""

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from endpoint_play import play_agent
from scripted import make_task, text_of

pytest.importorskip("openenv")
pytest.importorskip("verifiers")

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

EXAMPLES = Path(__file__).parents[2] / "examples"


class Say(Action):
    text: str


class Shown(Observation):
    word: str


class Backwards(Environment):
    """Two tries: half a point for a word's last letter first, half for the whole of it backwards, which ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, *, word):
        self.word, self.tries = word, 0
        return Shown(word=word)

    def step(self, action, timeout_s=None):
        self.tries += 1
        right = action.text == self.word[::-1]
        points = 0.5 * (action.text[:1] == self.word[-1]) + 0.5 * right
        return Shown(word=self.word, reward=points, done=right or self.tries == 2)


@asynccontextmanager
async def served():
    """Its address, on loopback."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    app = create_fastapi_app(Backwards, Say, Shown, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    serving = asyncio.ensure_future(server.serve([listening]))
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    await serving


async def test_each_observation_is_asked_and_the_rewards_are_summed(monkeypatch):
    from rollout.agent.verifiers import VerifiersEnvironment

    monkeypatch.syspath_prepend(str(EXAMPLES))
    async with served() as address:
        environment = VerifiersEnvironment(
            "openenv",
            arguments={"base_url": address, "resets": [{"word": "bird"}, {"word": "fish"}]},
            environment={"player": {"harness": {"id": "chat-loop"}}},
        )
        assert [row["question"] for row in environment.tasks()] == ["openenv", "openenv [1]"]
        task = replace(make_task(), id="words-1")
        trajectory, engine = await play_agent(environment.solve, task, "no", '{"text": "hsif"}')
        half, _ = await play_agent(environment.solve, task, "hs", "no")
    assert (trajectory.failure, trajectory.branches) == (None, ((0, 1),))
    assert '"word": "fish"' in text_of(engine.requests[0].prompt_token_ids)
    assert environment.score(task, trajectory.answer) == 1.0
    assert environment.score(task, half.answer) == 0.5
