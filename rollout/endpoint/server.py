"""The model endpoint of one rollout worker: three protocols over HTTP, on loopback, a key for each attempt."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from configs.errors import in_whole_letters
from envs.serving import LOOPBACK, listen
from rollout.endpoint import anthropic_messages, chat_completions, responses
from rollout.endpoint.attempt import Attempt, Call, Reply, ended
from rollout.endpoint.messages import Refused
from rollout.endpoint.request import Asked

_log = logging.getLogger(__name__)
MAX_ENDED = 10_000
"""Keys of attempts that have ended which are still told from foreign ones."""
CLIENT_LEFT = 499


class Dialect(Protocol):
    """A module that knows a protocol: how its requests are read and its replies are written. Of the `events` of a
    stream the last one ends it; `refusal_event` is written where a stream cannot go on."""

    PATH: str

    def read(self, body: object, attempt: Attempt) -> Asked:
        """Raises Refused."""
        ...

    def whole(self, reply: Reply, asked: Asked, model: str) -> Mapping[str, object]: ...

    def events(self, reply: Reply, asked: Asked, model: str) -> Iterator[str]: ...

    def refusal(self, error: Refused) -> Mapping[str, object]: ...

    def refusal_event(self, error: Refused) -> str: ...


KNOWN: tuple[Dialect, ...] = (chat_completions, anthropic_messages, responses)
DIALECTS = {one.PATH: one for one in KNOWN}


class Endpoint:
    """Serves the attempts that are open. It starts with the first of them, in the loop that this one runs in."""

    def __init__(self) -> None:
        self._attempts: dict[str, Attempt] = {}
        self._ended: dict[str, None] = {}
        self._server: _Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port = 0

    @property
    def base_url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}/v1"

    async def admit(self, attempt: Attempt) -> None:
        """Its key is good from now on."""
        if self._loop is not asyncio.get_running_loop():
            await self._start()
        self._attempts[attempt.key] = attempt

    def dismiss(self, attempt: Attempt) -> None:
        """Its key is that of an attempt that has ended."""
        del self._attempts[attempt.key]
        self._ended[attempt.key] = None
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def close(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    async def _start(self) -> None:
        self.close()
        listening = listen(LOOPBACK, 0)
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(self._app(), log_config=None, access_log=False, lifespan="off", timeout_keep_alive=300)
        self._server = _Server(config)
        self._loop = asyncio.get_running_loop()
        self._serving = self._loop.create_task(self._server.serve([listening]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/answer", self._take_answer, methods=["POST"]),
            *(Route(path, partial(self._complete, one), methods=["POST"]) for path, one in DIALECTS.items()),
        ]
        return Starlette(routes=routes, exception_handlers={Refused: _refusal})

    def _attempt(self, request: Request) -> Attempt:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key", bearer).strip()
        if key in self._ended:
            raise ended()
        if key not in self._attempts:
            raise Refused("this key is of no attempt here", status=401, code="invalid_api_key")
        return self._attempts[key]

    async def _models(self, request: Request) -> Response:
        name = self._attempt(request).rules.model
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "agentflow"}]}
        )

    async def _take_answer(self, request: Request) -> Response:
        attempt, body = self._attempt(request), await _body(request)
        if not isinstance(body, dict) or not isinstance(body.get("answer"), str):
            raise Refused('the body must be {"answer": "..."}')
        attempt.take_answer(body["answer"])
        return JSONResponse({})

    async def _complete(self, dialect: Dialect, request: Request) -> Response:
        attempt = self._attempt(request)
        asked = dialect.read(await _body(request), attempt)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = attempt.call(asked, name=request.headers.get("idempotency-key"), is_retry=is_retry)
        if asked.stream:
            events = _events(dialect, call, attempt.rules.model)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return await _whole(dialect, call, request, attempt.rules.model)


class _Server(uvicorn.Server):
    """One that leaves the signals to the process that it runs in."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(request: Request) -> object:
    try:
        return in_whole_letters(await request.json())
    except (ValueError, RecursionError):
        raise Refused("the body is no JSON") from None
    except ClientDisconnect:
        raise Refused("the client went away", status=CLIENT_LEFT) from None


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    if error.status in (401, 403):
        _log.warning("a call of the model endpoint was refused: %s", error)
    dialect: Dialect = DIALECTS.get(request.url.path, chat_completions)
    return JSONResponse(dialect.refusal(error), status_code=error.status)


async def _whole(dialect: Dialect, call: Call, request: Request, model: str) -> Response:
    answer, gone = asyncio.ensure_future(call.reply()), asyncio.ensure_future(_client_leaves(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            call.left = not call.delivered
            return Response(status_code=CLIENT_LEFT)
        reply = answer.result()
    finally:
        answer.cancel()
        gone.cancel()
    call.delivered = True
    return JSONResponse(dialect.whole(reply, call.asked, model))


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(dialect: Dialect, call: Call, model: str) -> AsyncIterator[str]:
    """A reply is sent once it is sampled to its end. A client that leaves before the last event has not got it."""
    # One that leaves while it is sampled is met by the same end.
    whole = False
    try:
        try:
            reply = await call.reply()
        except Refused as error:
            yield dialect.refusal_event(error)
            return
        *before, last = dialect.events(reply, call.asked, model)
        for event in before:
            yield event
        whole = call.delivered = True
        yield last
    finally:
        call.left = not whole and not call.delivered
