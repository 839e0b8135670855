"""Memory across episodes: solved tasks in Qdrant, found by the similarity of their questions and shown as hints.

A hint shows the steps that led to an answer, without the answer. An entry is written by a model, and a shared server
may hold entries of anybody, so all of it is data: a hint is one line of printable characters, of bounded length,
between marks that it cannot contain.
"""

import asyncio
import importlib.util
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from configs.api_keys import find_key
from configs.errors import UserError, whole_letters
from configs.rollout import FolderMemoryConfig, LocalMemoryConfig, ServerMemoryConfig
from envs.datasets.rows import question_key
from envs.sandbox.protocol import cut_middle
from envs.types import Task, ToolResult
from rollout.agent.planner import shown
from rollout.types import Trajectory

if TYPE_CHECKING:
    from qdrant_client import QdrantClient
    from tokenizers import Tokenizer

COLLECTION = "agentflow_experience"
HEADING = "Hints from other tasks that were solved:"
MAX_HINTS = 3
MAX_HINT_CHARS = 300
MIN_SIMILARITY = 0.5
"""Cosine similarity that two questions have at least if one is a hint for the other."""
MAX_ENTRIES = 10_000
MAX_STEPS = 6
MAX_STEP_CHARS = 200

DIMENSIONS = 256
_WEIGHTS = "weights/l2_supercat_256.safetensors"
_TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
_MAX_CHARS = 8000
_TIMEOUT_S = 5
_ID_NAMESPACE = uuid.UUID("5bfa2c0e-7d1c-4f4b-9a35-0f5a3f0d8c11")

T = TypeVar("T")


class MemoryUnavailableError(UserError):
    """A memory that could not be opened, or a Qdrant call that failed."""


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the memory, the payload of a point in Qdrant."""

    task_id: str
    question: str
    steps: tuple[str, ...]
    """Action and input of each tool call."""

    @property
    def hint(self) -> str:
        """The entry as one line without control and format characters."""
        return one_line(f"{self.question} -> {'; '.join(self.steps)}", MAX_HINT_CHARS)


def experience_of(trajectory: Trajectory) -> Experience | None:
    """Return the entry of a right trajectory, or None if it would have no steps.

    The answer is left out, and so is every step that contains the reference answer or the given one: a task with the
    same question and another id must still be worked out.
    """
    task = trajectory.task
    answers = {answer.strip() for answer in (task.answer, trajectory.answer or "") if answer.strip()}
    patterns = [re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE) for answer in answers]
    calls = [
        turn.tool_call
        for turn in trajectory.planner_turns
        if turn.tool_call and turn.tool_result and turn.tool_result.error is None
    ]
    steps = tuple(
        one_line(f"{call.name}: {call.arguments}", MAX_STEP_CHARS)
        for call in calls
        if call.name not in ("think", "answer") and not any(pattern.search(call.arguments) for pattern in patterns)
    )
    if not steps:
        return None
    return Experience(task_id=task.id, question=task.question, steps=steps[:MAX_STEPS])


def one_line(text: str, max_chars: int) -> str:
    """Return a text as one line without control and format characters, cut to a length."""
    clean = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return " ".join(cut_middle(clean, max_chars).split())


def _read(payload: object) -> Experience | None:
    try:
        return msgspec.convert(payload, Experience)
    except msgspec.ValidationError:
        # Anybody may have written it into a shared server.
        return None


@cache
def _embedding() -> tuple["Tokenizer", NDArray[np.float32]]:
    """Return a tokenizer and the trained vectors of its tokens, 33 MB. Raises FileNotFoundError without their package.

    The files are read directly: the package's loader looks for its tokenizer in another folder than it is installed
    in, and would download it.
    """
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    # Importing the package would configure logging for the whole process.
    spec = importlib.util.find_spec("wordllama")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the memory needs the vectors of the package `wordllama`, which is not installed")
    folder = Path(spec.origin).parent
    vectors = load_file(str(folder / _WEIGHTS))["embedding.weight"].astype(np.float32)
    return Tokenizer.from_file(str(folder / _TOKENIZER)), vectors


def embed(text: str) -> NDArray[np.float32]:
    """Return the mean of the vectors of a text's tokens, scaled to length 1, or zeros for a text without tokens."""
    tokenizer, vectors = _embedding()
    token_ids = tokenizer.encode(whole_letters(text[:_MAX_CHARS]), add_special_tokens=False).ids
    if not token_ids:
        return np.zeros(DIMENSIONS, dtype=np.float32)
    mean = vectors[token_ids].mean(axis=0)
    return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), dtype=np.float32)


class EpisodicMemory:
    """A memory with one entry per question.

    All work is done in one thread, so calls may come from any event loop. Qdrant is opened at the first call. Every
    call raises MemoryUnavailableError if Qdrant cannot be reached or its folder is in use.
    """

    def __init__(self, config: LocalMemoryConfig | FolderMemoryConfig | ServerMemoryConfig) -> None:
        self._config = config
        self.in_evaluation = config.in_evaluation
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory")

    def close(self) -> None:
        self._thread.shutdown()
        if "_client" in self.__dict__:
            self._client.close()

    async def hints(self, task: Task) -> str:
        """Return the hints of similar solved tasks for a planner's prompt, quoted as text from outside.

        A task never gets hints of itself. The text is empty if there are none.
        """
        if not (hints := await self._in_thread(lambda: self._similar(task))):
            return ""
        lines = "\n".join(f"- {hint}" for hint in hints)
        return f"{HEADING}\n{shown(ToolResult(text=lines, foreign=True))}"

    async def remember(self, trajectory: Trajectory) -> bool:
        """Add a right trajectory, and return whether it was kept.

        Of several solutions of a question the one with the fewest steps is kept.
        """
        experience = experience_of(trajectory)
        return experience is not None and await self._in_thread(lambda: self._add(experience))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def guarded() -> T:
            try:
                return work()
            except Exception as error:
                setting = {"folder": "path", "server": "url"}.get(self._config.type, "type")
                # The server's own message is omitted: it may quote a key, and is text from outside.
                raise MemoryUnavailableError(
                    f"the memory failed ({type(error).__name__}); check "
                    f"agent.memory.{setting} = '{getattr(self._config, setting)}'"
                ) from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    @cached_property
    def _client(self) -> "QdrantClient":
        from qdrant_client import QdrantClient, models

        match self._config:
            case FolderMemoryConfig(path=path):
                client = QdrantClient(path=path)
            case ServerMemoryConfig(url=url, api_key_env=variable):
                key = find_key(variable) if variable else None
                client = QdrantClient(url=url, api_key=key, timeout=_TIMEOUT_S, check_compatibility=False)
            case _:
                client = QdrantClient(location=":memory:")
        if not client.collection_exists(COLLECTION):
            vectors = models.VectorParams(size=DIMENSIONS, distance=models.Distance.COSINE)
            client.create_collection(COLLECTION, vectors_config=vectors)
        return client

    def _similar(self, task: Task) -> list[str]:
        key = question_key(task.question)
        points = self._client.query_points(
            COLLECTION,
            query=embed(task.question).tolist(),
            score_threshold=MIN_SIMILARITY,
            limit=3 * MAX_HINTS,
            with_payload=True,
        ).points
        by_steps: dict[tuple[str, ...], str] = {}
        for entry in filter(None, (_read(point.payload) for point in points)):
            if entry.steps and entry.task_id != task.id and question_key(entry.question) != key:
                by_steps.setdefault(entry.steps, entry.hint)
        return list(by_steps.values())[:MAX_HINTS]

    def _add(self, experience: Experience) -> bool:
        from qdrant_client import models

        point_id = str(uuid.uuid5(_ID_NAMESPACE, question_key(experience.question)))
        known = self._client.retrieve(COLLECTION, ids=[point_id], with_payload=True)
        earlier = _read(known[0].payload) if known else None
        if earlier is not None and len(earlier.steps) <= len(experience.steps):
            return False
        if not known and self._client.count(COLLECTION, exact=True).count >= MAX_ENTRIES:
            return False
        vector = embed(experience.question).tolist()
        point = models.PointStruct(id=point_id, vector=vector, payload=msgspec.to_builtins(experience))
        self._client.upsert(COLLECTION, points=[point], wait=True)
        return True
