"""The model endpoint of one rollout worker: three protocols over HTTP on loopback, and one key per attempt."""

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
from rollout.endpoint.attempt import Attempt, Call, Reply, attempt_ended
from rollout.endpoint.messages import RequestError
from rollout.endpoint.request import ModelRequest

_log = logging.getLogger(__name__)
MAX_ENDED = 10_000
"""Keys of ended attempts that are remembered, to tell them from unknown keys."""
CLIENT_CLOSED_REQUEST = 499


class Dialect(Protocol):
    """A module that reads the requests of a protocol and writes its replies."""

    PATH: str

    def read(self, body: object, attempt: Attempt) -> ModelRequest:
        """Read a request. Raises RequestError."""
        ...

    def whole(self, reply: Reply, request: ModelRequest, model: str) -> Mapping[str, object]: ...

    def events(self, reply: Reply, request: ModelRequest, model: str) -> Iterator[str]:
        """Yield the events of a stream, of which the last one ends it."""
        ...

    def refusal(self, error: RequestError) -> Mapping[str, object]: ...

    def refusal_event(self, error: RequestError) -> str:
        """Return the event that ends a stream with an error."""
        ...


_MODULES: tuple[Dialect, ...] = (chat_completions, anthropic_messages, responses)
DIALECTS = {module.PATH: module for module in _MODULES}


class Endpoint:
    """Serves the open attempts. The first attempt starts the server, in the event loop that is running then."""

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
        """Accept calls with the attempt's key from now on."""
        if self._loop is not asyncio.get_running_loop():
            await self._start()
        self._attempts[attempt.key] = attempt

    def dismiss(self, attempt: Attempt) -> None:
        """Reject calls with the attempt's key from now on."""
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
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/answer", self._take_answer, methods=["POST"]),
            *(Route(path, partial(self._complete, one), methods=["POST"]) for path, one in DIALECTS.items()),
        ]
        app = Starlette(routes=routes, exception_handlers={RequestError: _refusal})
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=300)
        self._server = _Server(config)
        self._loop = asyncio.get_running_loop()
        self._serving = self._loop.create_task(self._server.serve([listening]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)

    def _attempt(self, request: Request) -> Attempt:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key", bearer).strip()
        if key in self._ended:
            raise attempt_ended()
        if key not in self._attempts:
            raise RequestError("this key belongs to no attempt of this worker", status=401, code="invalid_api_key")
        return self._attempts[key]

    async def _models(self, request: Request) -> Response:
        name = self._attempt(request).rules.model
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "agentflow"}]}
        )

    async def _take_answer(self, request: Request) -> Response:
        attempt, body = self._attempt(request), await _body(request)
        if not isinstance(body, dict) or not isinstance(body.get("answer"), str):
            raise RequestError('the body must be {"answer": "..."}')
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
    """A server that leaves signal handling to the worker's process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _body(request: Request) -> object:
    try:
        return in_whole_letters(await request.json())
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None
    except ClientDisconnect:
        raise RequestError("the client disconnected", status=CLIENT_CLOSED_REQUEST) from None


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if error.status in (401, 403):
        _log.warning("the model endpoint rejected a call: %s", error)
    dialect: Dialect = DIALECTS.get(request.url.path, chat_completions)
    return JSONResponse(dialect.refusal(error), status_code=error.status)


async def _whole(dialect: Dialect, call: Call, request: Request, model: str) -> Response:
    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = asyncio.ensure_future(call.reply()), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            call.left = not call.delivered
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        reply = answer.result()
    finally:
        answer.cancel()
        gone.cancel()
    call.delivered = True
    return JSONResponse(dialect.whole(reply, call.request, model))


async def _events(dialect: Dialect, call: Call, model: str) -> AsyncIterator[str]:
    # A client that disconnects before the last event, also while the reply is sampled, has not received it.
    whole = False
    try:
        try:
            reply = await call.reply()
        except RequestError as error:
            yield dialect.refusal_event(error)
            return
        *before, last = dialect.events(reply, call.request, model)
        for event in before:
            yield event
        whole = call.delivered = True
        yield last
    finally:
        call.left = not whole and not call.delivered
