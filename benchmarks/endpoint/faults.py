"""Faults that are planted at an endpoint, each in an attempt of its own, and what became of it."""

import asyncio
import os
import tempfile
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from rollout.agent.own import CommandSolving, GivenTask, OwnAgent

from benchmarks.endpoint.attempts import LEAVE_S, LoggingEngine, ScriptedSampler
from envs.types import Task
from learner.samples import samples_of
from learner.types import TrainingSample
from rollout.agent.program import Program
from rollout.chat import ChatFormat
from rollout.endpoint.attempt import Attempt
from rollout.endpoint.request import Rules
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import engine_writers
from rollout.types import Trajectory

RULES = Rules(model="policy", temperature=1.0, override=False, max_tokens=32, max_context_tokens=2048)
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "17 + 25?"}]}
SAMPLING: Sequence[tuple[str, Any]] = (
    ("temperature", 0.2),
    ("top_p", 0.9),
    ("presence_penalty", 0.5),
    ("frequency_penalty", 0.5),
    ("logit_bias", {"5": 1}),
)
PROGRAM = """
import json, os, sys, time, urllib.request
def ask():
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "17 + 25?"}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
ask()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one planted fault; `caught`: nothing false was trained or scored, and nothing was left behind."""

    fault: str
    done: str
    happened: str
    caught: bool


class World:
    """Plays one attempt at a time over a scripted engine."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._count = 0
        self.endpoint = Endpoint()
        self.engine = LoggingEngine(ScriptedSampler(tokenizer, seed=1))

    async def play(self, solving: Any, rules: Rules = RULES, timeout_s: float = 60.0) -> Trajectory:
        self._count += 1
        name = f"fault-{self._count}"
        task = Task(id=name, dataset="audit", question="17 + 25?", answer="42")
        agent = OwnAgent(
            solving,
            self.endpoint,
            writer=engine_writers(self.engine, 1.0),
            chat=ChatFormat(self._tokenizer),
            rules=rules,
            timeout_s=timeout_s,
        )
        return await agent.run(task, trajectory_id=name, group_id="audit")


Doing = Callable[["Client"], Awaitable[None]]


class Client:
    """Posts as one attempt, or with another key; remembers what was answered."""

    def __init__(self, attempt: Attempt, endpoint: Endpoint, engine: LoggingEngine, name: str) -> None:
        self.engine = engine
        self.key = attempt.key
        self.name = name
        self._url = f"{endpoint.base_url}/chat/completions"
        self.answers: list[httpx.Response] = []

    async def post(self, body: Any = ASKED, *, key: str | None = None, **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            headers = {"Authorization": f"Bearer {key or self.key}", **headers}
            self.answers.append(await client.post(self._url, json=body, headers=headers))
        return self.answers[-1]

    async def leave(self) -> None:
        """Ask for a stream, and cut it while it is sampled."""
        gate = self.engine.gates[self.name] = asyncio.Event()
        asking = asyncio.ensure_future(self.post({**ASKED, "stream": True}))
        while not self.engine.begun[self.name]:  # noqa: ASYNC110 (nothing tells of it)
            await asyncio.sleep(0.002)
        asking.cancel()
        await asyncio.wait((asking,))
        await asyncio.sleep(LEAVE_S)
        gate.set()
        await asyncio.sleep(LEAVE_S)


class Acting:
    """An agent that does one thing."""

    def __init__(self, engine: LoggingEngine, doing: Doing) -> None:
        self._engine = engine
        self._doing = doing
        self.client: Client | None = None

    async def answer(self, task: GivenTask, attempt: Attempt, endpoint: Endpoint) -> str:
        self.client = Client(attempt, endpoint, self._engine, task.id)
        await self._doing(self.client)
        return "42"


async def planted_faults(tokenizer: Any) -> list[Outcome]:
    """All that the design names, in its order."""
    world = World(tokenizer)
    outcomes = [
        await _odd_ids(world, tokenizer),
        await _foreign_key(world),
        await _call_after_reward(world),
        await _retry(world),
        *[await _sampling(world, name, value) for name, value in SAMPLING],
        await _model_name(world),
        await _overflow(world),
        await _cut_stream(world),
        *[await _program(world, *broken) for broken in PROGRAMS],
        await _daemon(world),
        await _shared_files(world),
    ]
    world.endpoint.close()
    return outcomes


def _asking(body: Any = ASKED, *, key: str | None = None) -> Doing:
    async def doing(client: Client) -> None:
        await client.post(body, key=key)

    return doing


async def _acted(world: World, doing: Doing, rules: Rules = RULES) -> tuple[Trajectory, Client]:
    acting = Acting(world.engine, doing)
    trajectory = await world.play(acting, rules)
    assert acting.client is not None
    return trajectory, acting.client


def _samples(trajectory: Trajectory) -> list[TrainingSample]:
    return samples_of(trajectory, [1.0] * len(trajectory.planner_turns), temperature=1.0)


def _told(answer: httpx.Response) -> str:
    error = answer.json()["error"]
    return f"{answer.status_code} {error['code'] or ''} {error['param'] or ''}".strip()


async def _odd_ids(world: World, tokenizer: Any) -> Outcome:
    """Go on until a reply was sampled in ids that its text is not tokenised to."""
    for _ in range(100):
        trajectory, client = await _acted(world, _two_turns)
        first, second = trajectory.turns
        ids = first.completion.token_ids
        text = tokenizer.decode(ids, skip_special_tokens=True)
        again = tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)
        if again != ids and again != ids[:-1]:
            break
    own = first.prompt_token_ids + ids
    (sample,) = _samples(trajectory)
    trained = tuple(sample.token_ids[sample.loss_mask].tolist())
    logged = tuple(token for entry in world.engine.log[client.name] for token in entry.token_ids)
    return Outcome(
        fault="a turn whose ids differ when tokenised again",
        done=f"a reply of {len(ids)} ids whose text makes {len(again)}, and went on from it",
        happened="the next prompt and the training sample hold the sampled ids",
        caught=again != ids and second.prompt_token_ids[: len(own)] == own and trained == logged,
    )


async def _two_turns(client: Client) -> None:
    message = (await client.post()).json()["choices"][0]["message"]
    await client.post({**ASKED, "messages": [*ASKED["messages"], message, {"role": "user", "content": "Sure?"}]})


async def _foreign_key(world: World) -> Outcome:
    _, client = await _acted(world, _asking(key="sk-somebody"))
    return Outcome(
        fault="a foreign key",
        done="asked with a key of no attempt",
        happened=_told(client.answers[0]),
        caught=client.answers[0].status_code == 401 and not world.engine.begun[client.name],
    )


async def _call_after_reward(world: World) -> Outcome:
    trajectory, client = await _acted(world, _asking())
    late = await client.post()
    return Outcome(
        fault="a stale key; a call after the reward",
        done="asked again with the key of an attempt that had ended",
        happened=_told(late),
        caught=late.status_code == 403 and world.engine.begun[client.name] == len(trajectory.turns) == 1,
    )


async def _retry(world: World) -> Outcome:
    async def twice(client: Client) -> None:
        await client.post(**{"Idempotency-Key": "k"})
        await client.post(**{"Idempotency-Key": "k"})
        await client.post(**{"x-stainless-retry-count": "1"})

    trajectory, client = await _acted(world, twice)
    replies = {answer.json()["id"] for answer in client.answers}
    return Outcome(
        fault="a client's retry counted twice",
        done="asked three times: two with one key, one that says that it retries",
        happened=f"{len(replies)} reply, {len(trajectory.turns)} turn",
        caught=len(replies) == len(trajectory.turns) == world.engine.begun[client.name] == 1,
    )


async def _sampling(world: World, name: str, value: Any) -> Outcome:
    _, client = await _acted(world, _asking({**ASKED, name: value}))
    answer = client.answers[0]
    return Outcome(
        fault=f"another {name}",
        done=f"asked with {name} = {value}",
        happened=_told(answer),
        caught=answer.json()["error"]["param"] == name and not world.engine.begun[client.name],
    )


async def _model_name(world: World) -> Outcome:
    _, client = await _acted(world, _asking({**ASKED, "model": "gpt-5"}))
    return Outcome(
        fault="a model name that is not ours",
        done="asked for gpt-5",
        happened=_told(client.answers[0]),
        caught=client.answers[0].status_code == 404 and not world.engine.begun[client.name],
    )


async def _overflow(world: World) -> Outcome:
    rules = replace(RULES, max_context_tokens=8)
    _, client = await _acted(world, _asking(), rules)
    return Outcome(
        fault="a context overflow",
        done="sent messages that fill the context",
        happened=_told(client.answers[0]),
        caught="context_length_exceeded" in _told(client.answers[0]) and not world.engine.begun[client.name],
    )


async def _cut_stream(world: World) -> Outcome:
    trajectory, _ = await _acted(world, Client.leave)
    (turn,) = trajectory.turns
    trained = sum(sample.num_loss_tokens for sample in _samples(trajectory))
    return Outcome(
        fault="a stream cut by the client",
        done="left while it was sampled, and never asked again",
        happened=f"1 turn recorded, {trained} of {len(turn.completion.token_ids)} tokens trained",
        caught=trained == 0 and not turn.trainable,
    )


PROGRAMS: Sequence[tuple[str, str, float]] = (
    ("an agent that exits non-zero", "raise SystemExit('no luck')", 60),
    ("an agent that prints nothing", "", 60),
    ("an agent that hangs and ignores SIGTERM", "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(600)", 6),
)


async def _program(world: World, fault: str, ending: str, timeout_s: float) -> Outcome:
    trajectory, _ = await _ran(world, ending, timeout_s)
    return Outcome(
        fault=fault,
        done="a program asked once, and then did so",
        happened=f"unscored: {trajectory.failure}",
        caught=trajectory.failure is not None and trajectory.answer is None,
    )


async def _daemon(world: World) -> Outcome:
    ending = """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                open(sys.argv[1] + "/daemon", "w").write(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        while not (os.path.exists(sys.argv[1] + "/daemon") and open(sys.argv[1] + "/daemon").read()):
            time.sleep(0.01)
        print("42")
    """
    trajectory, notes = await _ran(world, ending, 60)
    gone = await asyncio.to_thread(_gone, int(notes["daemon"]))
    return Outcome(
        fault="an agent that forks a daemon",
        done="a program left its process group, answered and slept on",
        happened="answered; the daemon was killed" if gone else "the daemon lives",
        caught=gone and trajectory.answer == "42",
    )


async def _shared_files(world: World) -> Outcome:
    """Two attempts write where programs write: the working folder, HOME, and the folder for temporary files."""
    ending = """
        import tempfile
        places = [".", os.environ["HOME"], tempfile.gettempdir()]
        seen = [place for place in places if os.path.exists(place + "/left")]
        for place in places:
            open(place + "/left", "w").write("x")
        print(len(seen))
    """
    seen = [(await _ran(world, ending, 60))[0].answer for _ in range(2)]
    return Outcome(
        fault="two attempts that share state through the file system",
        done="each left files in its working folder, HOME and TMPDIR, and looked for the other's",
        happened="neither found any" if seen == ["0", "0"] else f"found {seen}",
        caught=seen == ["0", "0"],
    )


async def _ran(world: World, ending: str, timeout_s: float) -> tuple[Trajectory, dict[str, str]]:
    """A program's attempt, and what it wrote into the folder that it was named."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "agent.py").write_text(PROGRAM + textwrap.dedent(ending))
        notes = place / "notes"
        notes.mkdir()
        solving = CommandSolving(Program(f"python agent.py {notes}", folder), "policy")
        trajectory = await world.play(solving, timeout_s=timeout_s)
        return trajectory, {note.name: note.read_text() for note in notes.iterdir()}


def _gone(process: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def table(outcomes: Sequence[Outcome]) -> str:
    """As Markdown."""
    rows = [f"| {one.fault} | {one.done} | {one.happened} | {'yes' if one.caught else 'NO'} |" for one in outcomes]
    return "\n".join(("| fault | what was done | what happened | caught |", "| --- | --- | --- | --- |", *rows))
