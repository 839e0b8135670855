"""Memory across episodes: earlier successes in Qdrant, found again by the likeness of their questions, as hints.

What a solved task teaches another one are the steps that led to the answer, without the answer. An entry comes from a
model's own words, and from a shared server anybody's: it is data. Whatever it holds, it becomes one line of printable
characters, of bounded length, between marks that it cannot contain.
"""

import asyncio
import importlib.util
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.api_keys import find_key
from configs.errors import UserError, whole_letters
from configs.rollout import FolderMemoryConfig, InProcessMemoryConfig, ServerMemoryConfig
from envs.datasets.split import question_key
from envs.sandbox.outcome import cut_middle
from envs.types import Task, ToolResult
from rollout.agent.planner import shown
from rollout.types import Trajectory

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

IN_PROCESS = ":memory:"
OWN_COLLECTION = "agentflow_experience"
MAX_ENTRY_CHARS = 300
"""Length limit of one hint."""
MAX_STEPS = 6
MAX_STEP_CHARS = 200
MAX_QUESTION_CHARS = 500
HEADING = "Hints from other tasks that were solved:"
_NO_STEP = ("think", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """`steps`: (action, input) of each tool call, in order. `key` is the whole question's, `question` may be cut."""

    task_id: str
    key: str
    question: str
    steps: tuple[tuple[str, str], ...]

    def render(self) -> str:
        """One line."""
        steps = "; ".join(f"{action}: {text}" for action, text in self.steps)
        return " ".join(cut_middle(f"{self.question} -> {steps}", MAX_ENTRY_CHARS).split())

    def payload(self) -> dict[str, object]:
        return {
            "task_id": self.task_id,
            "question": self.question,
            "key": self.key,
            "steps": [list(step) for step in self.steps],
        }


def experience_of(trajectory: Trajectory) -> Experience | None:
    """What a right trajectory teaches; None where no tool call is left to tell of.

    The answer is not told, nor any step that holds the reference answer or the one that was given: whoever meets the
    same question under another name must still work it out.
    """
    task = trajectory.task
    answers = {answer.strip() for answer in (task.answer, trajectory.answer or "") if answer.strip()}
    given_away = [re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE) for answer in answers]
    worked = [turn for turn in trajectory.planner_turns if turn.tool_result and turn.tool_result.error is None]
    calls = [turn.tool_call for turn in worked if turn.tool_call]
    steps = tuple(
        (call.name, one_line(call.arguments, MAX_STEP_CHARS))
        for call in calls
        if call.name not in _NO_STEP and not any(answer.search(call.arguments) for answer in given_away)
    )
    if not steps:
        return None
    return Experience(
        task_id=task.id,
        key=question_key(task.question),
        question=one_line(task.question, MAX_QUESTION_CHARS),
        steps=steps[:MAX_STEPS],
    )


def read_experience(payload: Mapping[str, object]) -> Experience | None:
    """An entry as a server gave it back, cleaned once more; None for what is no entry."""
    task_id, key, question, steps = (payload.get(name) for name in ("task_id", "key", "question", "steps"))
    if not (isinstance(task_id, str) and isinstance(key, str) and isinstance(question, str)):
        return None
    if not isinstance(steps, list):
        return None
    pairs = [step for step in steps[:MAX_STEPS] if _is_step(step)]
    if not pairs or not question.strip():
        return None
    return Experience(
        task_id=task_id,
        key=key,
        question=one_line(question, MAX_QUESTION_CHARS),
        steps=tuple((one_line(action, 40), one_line(text, MAX_STEP_CHARS)) for action, text in pairs),
    )


def render_hints(entries: Sequence[Experience]) -> str:
    """The part of the planner's prompt that shows them; empty without any."""
    if not entries:
        return ""
    lines = "\n".join(f"- {entry.render()}" for entry in entries)
    return f"{HEADING}\n{shown(ToolResult(text=lines, foreign=True))}"


def is_about(entry: Experience, question: str) -> bool:
    """Whether an entry was made from this very question."""
    return entry.key == question_key(question) or entry.question == one_line(question, MAX_QUESTION_CHARS)


def one_line(text: str, max_chars: int) -> str:
    """Without control and format characters, which a terminal or a reader's eye would obey."""
    words = " ".join(text.split())
    clean = "".join(letter for letter in words if letter.isprintable())
    return " ".join(cut_middle(clean, max_chars).split())


def _is_step(step: object) -> bool:
    return isinstance(step, list) and len(step) == 2 and all(isinstance(part, str) for part in step)


DIMENSIONS = 256
_WEIGHTS = "weights/l2_supercat_256.safetensors"
_TOKENIZER = "tokenizers/l2_supercat_tokenizer_config.json"
_MAX_CHARS = 8000


class WordEmbedder:
    """The mean of trained token vectors, scaled to length 1. Raises FileNotFoundError without the package's files.

    They are read directly: the package's own loader looks for its tokenizer in another folder than it ships it in,
    and would download it.
    """

    def __init__(self) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        folder = _package_folder()
        self._tokenizer: Any = Tokenizer.from_file(str(folder / _TOKENIZER))
        self._vectors = load_file(str(folder / _WEIGHTS))["embedding.weight"].astype(np.float32)

    def embed(self, text: str) -> NDArray[np.float32]:
        """A unit vector of DIMENSIONS numbers; zeros for a text without a single token."""
        token_ids = self._tokenizer.encode(whole_letters(text[:_MAX_CHARS]), add_special_tokens=False).ids
        if not token_ids:
            return np.zeros(DIMENSIONS, dtype=np.float32)
        mean = self._vectors[token_ids].mean(axis=0)
        return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), dtype=np.float32)


@cache
def shared_embedder() -> WordEmbedder:
    """One per process: 33 MB."""
    return WordEmbedder()


def _package_folder() -> Path:
    # Found without being imported, which would set up logging for the whole process.
    spec = importlib.util.find_spec("wordllama")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package `wordllama`, whose vectors the memory needs, is not installed")
    return Path(spec.origin).parent


T = TypeVar("T")
_TIMEOUT_S = 5
_ID_NAMESPACE = uuid.UUID("5bfa2c0e-7d1c-4f4b-9a35-0f5a3f0d8c11")


class MemoryUnavailableError(UserError):
    """Qdrant failed, or the memory could not be opened; nobody's answer was wrong."""


class EpisodicMemory:
    """One entry per question. All work is done in one thread of its own, so that calls may come from any event loop.

    Qdrant is opened at the first call; each raises MemoryUnavailableError where it cannot be reached, or where its
    folder is in use.
    """

    def __init__(self, config: InProcessMemoryConfig | FolderMemoryConfig | ServerMemoryConfig) -> None:
        self._config = config
        self.in_evaluation = config.in_evaluation
        self._collection = OWN_COLLECTION if isinstance(config, InProcessMemoryConfig) else config.collection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._opened: QdrantClient | None = None

    def close(self) -> None:
        self._thread.shutdown()
        if self._opened is not None:
            self._opened.close()

    @property
    def _where(self) -> tuple[str, str]:
        """The setting that says it, and what it says."""
        if isinstance(self._config, FolderMemoryConfig):
            return "path", self._config.path
        return ("url", self._config.url) if isinstance(self._config, ServerMemoryConfig) else ("type", IN_PROCESS)

    @property
    def _client(self) -> "QdrantClient":
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    async def hints(self, task: Task) -> str:
        """The part of the planner's prompt with what similar tasks were solved by; empty where there is none. The task
        itself is never among them, under its id or its question."""
        return render_hints(await self._in_thread(lambda: self._similar(task)))

    async def remember(self, trajectory: Trajectory) -> bool:
        """Keep what a right trajectory did; False where it teaches nothing new. Of two ways to solve one question the
        one with fewer steps is kept."""
        experience = experience_of(trajectory)
        return experience is not None and await self._in_thread(lambda: self._add(experience))

    async def size(self) -> int:
        return await self._in_thread(self._count)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._guarded(work))

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:
            # A server's words may quote a key, and are an outsider's.
            raise MemoryUnavailableError(
                f"the memory at {self._where[1]} failed ({type(error).__name__}); check agent.memory.{self._where[0]}"
            ) from None

    def _open(self) -> "QdrantClient":
        from qdrant_client import QdrantClient, models

        client = QdrantClient(**self._place())
        if not client.collection_exists(self._collection):
            vectors = models.VectorParams(size=DIMENSIONS, distance=models.Distance.COSINE)
            try:
                client.create_collection(self._collection, vectors_config=vectors)
            except Exception:
                # Another worker may have been faster.
                if not client.collection_exists(self._collection):
                    raise
        return client

    def _place(self) -> dict[str, Any]:
        config = self._config
        if isinstance(config, InProcessMemoryConfig):
            return {"location": IN_PROCESS}
        if isinstance(config, FolderMemoryConfig):
            return {"path": config.path}
        key = find_key(config.api_key_env) if config.api_key_env else None
        return {"url": config.url, "api_key": key, "timeout": _TIMEOUT_S, "check_compatibility": False}

    def _similar(self, task: Task) -> list[Experience]:
        from qdrant_client import models

        own: list[models.Condition] = [
            models.FieldCondition(key="key", match=models.MatchValue(value=question_key(task.question))),
            models.FieldCondition(key="task_id", match=models.MatchValue(value=task.id)),
        ]
        found = self._client.query_points(
            self._collection,
            query=shared_embedder().embed(task.question).tolist(),
            query_filter=models.Filter(must_not=own),
            score_threshold=self._config.min_similarity,
            limit=3 * self._config.top_k,
            with_payload=True,
        ).points
        by_steps: dict[tuple[tuple[str, str], ...], Experience] = {}
        for point in found:
            entry = read_experience(point.payload or {})
            # Checked again here: what a shared server filters by is its own word.
            if entry is not None and not is_about(entry, task.question):
                by_steps.setdefault(entry.steps, entry)
        return list(by_steps.values())[: self._config.top_k]

    def _add(self, experience: Experience) -> bool:
        from qdrant_client import models

        point_id = str(uuid.uuid5(_ID_NAMESPACE, experience.key))
        known = self._client.retrieve(self._collection, ids=[point_id], with_payload=True)
        earlier = read_experience(known[0].payload or {}) if known else None
        if earlier is not None and len(earlier.steps) <= len(experience.steps):
            return False
        if not known and self._count() >= self._config.max_entries:
            return False
        vector = shared_embedder().embed(experience.question).tolist()
        point = models.PointStruct(id=point_id, vector=vector, payload=experience.payload())
        self._client.upsert(self._collection, points=[point], wait=True)
        return True

    def _count(self) -> int:
        return self._client.count(self._collection, exact=True).count
