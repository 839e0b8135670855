"""A worker's way to bring groups back to the store."""

import asyncio
from typing import TYPE_CHECKING

from rollout.store.lifecycle import GroupResult, Lease

if TYPE_CHECKING:
    from actors.handles import StoreHandle


class Courier:
    """One call at a time, with all that came back during the one before: the busier the store is, the fewer calls it
    gets."""

    def __init__(self, store: "StoreHandle") -> None:
        self._store = store
        self._waiting: list[tuple[Lease, GroupResult, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def bring(self, lease: Lease, result: GroupResult) -> None:
        """Returns once the store has written it down. Raises what the store's call raised."""
        brought = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, result, brought))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        await brought

    async def _send(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            error: Exception | None = None
            try:
                await self._store.complete.remote([(lease, result) for lease, result, _ in together])
            except Exception as raised:
                error = raised
            for brought in (brought for *_, brought in together if not brought.done()):
                if error is None:
                    brought.set_result(None)
                else:
                    brought.set_exception(error)
