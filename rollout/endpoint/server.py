"""The model endpoint of one rollout worker: three protocols over HTTP on loopback, and one key per attempt."""

import asyncio
import json
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
from rollout.endpoint.attempt import Attempt, Call, Reply
from rollout.endpoint.messages import RequestError
from rollout.endpoint.request import ModelRequest

_log = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499


class Dialect(Protocol):
    """A module that reads the requests of a protocol and writes its replies."""

    PATH: str

    def read(self, body: object, attempt: Attempt) -> ModelRequest: ...

    def whole(self, reply: Reply) -> Mapping[str, object]: ...

    def events(self, reply: Reply) -> Iterator[Mapping[str, object] | str]: ...

    def refusal(self, error: RequestError) -> Mapping[str, object]: ...


_MODULES: tuple[Dialect, ...] = (chat_completions, anthropic_messages, responses)
DIALECTS = {module.PATH: module for module in _MODULES}


class Endpoint:
    """Serves the open attempts. The first attempt starts the server, in the event loop that is running then."""

    def __init__(self) -> None:
        self._attempts: dict[str, Attempt] = {}
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
        if key not in self._attempts:
            raise RequestError("this key belongs to no open attempt of this worker", status=401, code="invalid_api_key")
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
        if not attempt.posted.done():
            attempt.posted.set_result(body["answer"])
        return JSONResponse({})

    async def _complete(self, dialect: Dialect, request: Request) -> Response:
        attempt = self._attempt(request)
        asked = dialect.read(await _body(request), attempt)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = attempt.call(asked, name=request.headers.get("idempotency-key"), is_retry=is_retry)
        if asked.body.get("stream") is True:
            events = _events(dialect, call)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return await _whole(dialect, call, request)


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


async def _whole(dialect: Dialect, call: Call, request: Request) -> Response:
    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((call.answering, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            call.left = not call.delivered
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        gone.cancel()
    reply = await call.answered()
    call.delivered = True
    return JSONResponse(dialect.whole(reply))


async def _events(dialect: Dialect, call: Call) -> AsyncIterator[str]:
    # A client that disconnects before the last event, also while the reply is sampled, has not received it.
    whole = False
    try:
        try:
            *before, last = dialect.events(await call.answered())
        except RequestError as error:
            yield _event(dialect.refusal(error))
            return
        for event in before:
            yield _event(event)
        whole = call.delivered = True
        yield _event(last)
    finally:
        call.left = not whole and not call.delivered


def _event(value: Mapping[str, object] | str) -> str:
    """Return a server-sent event, with the name of its type if it has one."""
    if isinstance(value, str):
        return f"data: {value}\n\n"
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n"
