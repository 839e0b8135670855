"""Memory across episodes: earlier successes in Qdrant, found again by the likeness of their questions."""

import asyncio
import fcntl
import importlib.util
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.api_keys import find_key
from configs.errors import UserError, whole_letters
from configs.rollout import FolderMemoryConfig, InProcessMemoryConfig, ServerMemoryConfig
from envs.datasets.split import question_key
from envs.types import Task
from rollout.memory.hints import Experience, experience_of, is_about, read_experience, render_hints
from rollout.types import Trajectory

MEMORY = Path("/dev/shm")
IN_PROCESS = ":memory:"
OWN_COLLECTION = "agentflow_experience"
MAX_ENTRY_CHARS = 300
"""Length limit of one hint."""
_LOCK = ".lock"
_NAME = re.compile(r"agentflow-(\d+)-")


class MemoryFolder:
    """`path` is this process's own until `close`. It lies in memory where `needed` bytes are free there, else on disk.
    What processes left that did not come to close theirs is deleted when the next one begins: it takes room that Ray's
    objects need as well."""

    def __init__(self, needed: int = 0) -> None:
        disk = Path(tempfile.gettempdir())
        for place in {MEMORY, disk}:
            sweep(place)
        self.in_memory = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= needed
        place = MEMORY if self.in_memory else disk
        self._home = Path(tempfile.mkdtemp(prefix=f"agentflow-{os.getpid()}-", dir=place))
        # The system lets go of it when the process ends, however it ends.
        self._lock = (self._home / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = self._home / "files"
        self.path.mkdir()

    def close(self) -> None:
        self._lock.close()
        shutil.rmtree(self._home, ignore_errors=True)


def sweep(place: Path) -> None:
    """Delete the folders whose process has ended."""
    for folder in place.glob("agentflow-*"):
        if (named := _NAME.match(folder.name)) and folder.is_dir() and _is_left(folder, int(named[1])):
            shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path, pid: int) -> bool:
    """Whether nobody holds the lock. A number alone proves nothing: containers may share the memory and not the
    numbers."""
    try:
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return not _lives(pid)
    except OSError:
        return False
    return True


def _lives(pid: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


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


if TYPE_CHECKING:
    from qdrant_client import QdrantClient

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
    def in_evaluation(self) -> bool:
        """Whether evaluations see hints."""
        return self._config.in_evaluation

    @property
    def _client(self) -> "QdrantClient":
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    async def hints(self, task: Task) -> str:
        """The part of the planner's prompt with what similar tasks were solved by; empty where there is none. The task
        itself is never among them, under its id or its question."""
        entries = await self._in_thread(lambda: self._similar(task))
        return render_hints(entries, MAX_ENTRY_CHARS)

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
                f"the memory at {self._where[1]} failed ({type(error).__name__}); check memory.{self._where[0]}"
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
