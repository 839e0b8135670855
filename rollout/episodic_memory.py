"""Memory across episodes, on Qdrant: successes are remembered, and similar tasks get them as hints."""

import asyncio
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from configs.memory import IN_PROCESS, MemoryConfig
from envs.datasets.split import question_key
from envs.types import Task
from rollout.embedding import DIMENSIONS, shared_embedder
from rollout.experience import Experience, experience_of, is_about, read_experience, render_hints
from rollout.types import Trajectory

if TYPE_CHECKING:
    from qdrant_client import QdrantClient

T = TypeVar("T")
_TIMEOUT_S = 5
_ID_NAMESPACE = uuid.UUID("5bfa2c0e-7d1c-4f4b-9a35-0f5a3f0d8c11")


class MemoryUnavailableError(RuntimeError):
    """Qdrant failed, or the memory could not be opened; nobody's answer was wrong."""


class EpisodicMemory:
    """One entry per question. All work is done in one thread of its own, so that calls may come from any event loop.

    Qdrant is opened at the first call; each raises MemoryUnavailableError where it cannot be reached, or where its
    folder is in use.
    """

    def __init__(self, config: MemoryConfig) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._opened: QdrantClient | None = None

    def close(self) -> None:
        self._thread.shutdown()
        if self._opened is not None:
            self._opened.close()

    @property
    def _client(self) -> "QdrantClient":
        if self._opened is None:
            self._opened = self._open()
        return self._opened

    async def hints(self, task: Task) -> str:
        """The part of the planner's prompt with what similar tasks were solved by; empty where there is none. The task
        itself is never among them, under its id or its question."""
        entries = await self._in_thread(lambda: self._similar(task))
        return render_hints(entries, self._config.max_entry_chars)

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
                f"the memory at {self._config.location} failed ({type(error).__name__}); check memory.location"
            ) from None

    def _open(self) -> "QdrantClient":
        from qdrant_client import QdrantClient, models

        client = QdrantClient(**self._place())
        if not client.collection_exists(self._config.collection):
            vectors = models.VectorParams(size=DIMENSIONS, distance=models.Distance.COSINE)
            try:
                client.create_collection(self._config.collection, vectors_config=vectors)
            except Exception:
                # Another worker may have been faster.
                if not client.collection_exists(self._config.collection):
                    raise
        return client

    def _place(self) -> dict[str, Any]:
        config = self._config
        if config.location == IN_PROCESS:
            return {"location": IN_PROCESS}
        if not config.is_server:
            return {"path": config.location}
        key = os.environ.get(config.api_key_env) if config.api_key_env else None
        return {"url": config.location, "api_key": key, "timeout": _TIMEOUT_S, "check_compatibility": False}

    def _similar(self, task: Task) -> list[Experience]:
        from qdrant_client import models

        own: list[models.Condition] = [
            models.FieldCondition(key="key", match=models.MatchValue(value=question_key(task.question))),
            models.FieldCondition(key="task_id", match=models.MatchValue(value=task.id)),
        ]
        found = self._client.query_points(
            self._config.collection,
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
        known = self._client.retrieve(self._config.collection, ids=[point_id], with_payload=True)
        earlier = read_experience(known[0].payload or {}) if known else None
        if earlier is not None and len(earlier.steps) <= len(experience.steps):
            return False
        if not known and self._count() >= self._config.max_entries:
            return False
        vector = shared_embedder().embed(experience.question).tolist()
        point = models.PointStruct(id=point_id, vector=vector, payload=experience.payload())
        self._client.upsert(self._config.collection, points=[point], wait=True)
        return True

    def _count(self) -> int:
        return self._client.count(self._config.collection, exact=True).count
