"""The model endpoint of one rollout worker: three protocols over HTTP on loopback, and one key per attempt."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn import Config
from uvicorn.server import ServerState

from configs.errors import in_whole_letters
from envs.serving import LOOPBACK, listen
from rollout.endpoint import anthropic_messages, chat_completions, responses
from rollout.endpoint.attempt import REFUSAL_S, Attempt, Call, Reply, aside
from rollout.endpoint.connections import Connection, accept
from rollout.endpoint.messages import RequestError
from rollout.endpoint.request import ModelRequest

_log = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
MAX_BODY_BYTES = 8 * 2**20
MAX_RECEIVED_BYTES = 8 * MAX_BODY_BYTES
"""Bodies that are received at the same time."""


class Dialect(Protocol):
    """A module that reads the requests of a protocol and writes its replies."""

    def read(self, body: object, attempt: Attempt) -> ModelRequest: ...

    def whole(self, reply: Reply) -> Mapping[str, object]: ...

    def events(self, reply: Reply) -> Iterator[Mapping[str, object] | str]: ...

    def refusal(self, error: RequestError) -> Mapping[str, object]: ...


DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    "/v1/messages": anthropic_messages,
}


class Endpoint:
    """Serves the open attempts. The first attempt starts the server, in the event loop that is running then."""

    def __init__(self) -> None:
        self._attempts: dict[str, Attempt] = {}
        self._state = ServerState()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._port = 0
        self._num_received_bytes = 0

    @property
    def base_url(self) -> str:
        return f"http://{LOOPBACK}:{self._port}/v1"

    def admit(self, attempt: Attempt) -> None:
        """Accept calls with the attempt's key from now on."""
        if self._loop is not asyncio.get_running_loop():
            self._start()
        self._attempts[attempt.key] = attempt

    def dismiss(self, attempt: Attempt) -> None:
        """Reject calls with the attempt's key from now on, and close its connections."""
        del self._attempts[attempt.key]
        for connection in [*self._state.connections]:
            if isinstance(connection, Connection) and connection.key == attempt.key:
                connection.finish()

    def close(self) -> None:
        if self._loop and self._accepting and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._accepting.cancel)

    def _start(self) -> None:
        self.close()
        self._loop, self._state, listening = asyncio.get_running_loop(), ServerState(), listen(0)
        self._port = listening.getsockname()[1]
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/answer", self._take_answer, methods=["POST"]),
            *(Route(path, partial(self._complete, one), methods=["POST"]) for path, one in DIALECTS.items()),
        ]
        app = Starlette(routes=routes, exception_handlers={RequestError: _refusal})
        config = Config(app, log_config=None, access_log=False, ws="none", timeout_keep_alive=300)
        self._accepting = self._loop.create_task(accept(listening, config, self._state))

    def _attempt(self, request: Request) -> Attempt:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key", bearer).strip()
        if key not in self._attempts:
            raise RequestError("this key belongs to no open attempt of this worker", status=401, code="invalid_api_key")
        request.state.connection.key = key
        return self._attempts[key]

    async def _models(self, request: Request) -> Response:
        name = self._attempt(request).rules.model
        return JSONResponse(
            {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "agentflow"}]}
        )

    async def _take_answer(self, request: Request) -> Response:
        attempt, body = self._attempt(request), _json(await self._body(request))
        if not isinstance(body, dict) or not isinstance(body.get("answer"), str):
            raise RequestError('the body must be {"answer": "..."}')
        if not attempt.posted.done():
            attempt.posted.set_result(body["answer"])
        return JSONResponse({})

    async def _complete(self, dialect: Dialect, request: Request) -> Response:
        attempt = self._attempt(request)
        body = await self._body(request)
        asked = await aside(lambda: dialect.read(_json(body), attempt), len(body))
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        call = await attempt.call(asked, is_retry=is_retry)
        if asked.body.get("stream") is True:
            events = _events(dialect, call)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        return await _whole(dialect, call, request)

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        declared = request.headers.get("content-length", "0")
        try:
            if declared.isdecimal() and int(declared) <= MAX_BODY_BYTES:
                async for chunk in request.stream():
                    body += chunk
                    self._num_received_bytes += len(chunk)
                    if self._num_received_bytes > MAX_RECEIVED_BYTES:
                        raise RequestError("too many large requests are being received; ask again", status=503)
                    if len(body) > MAX_BODY_BYTES:
                        break
                else:
                    return bytes(body)
            raise RequestError(f"a body may have {MAX_BODY_BYTES} bytes", status=413, code="request_too_large")
        except ClientDisconnect:
            raise RequestError("the client disconnected", status=CLIENT_CLOSED_REQUEST) from None
        finally:
            self._num_received_bytes -= len(body)


def _json(body: bytes) -> object:
    try:
        return in_whole_letters(json.loads(body, parse_float=_finite, parse_constant=_finite))
    except (ValueError, RecursionError):
        raise RequestError("the body is not JSON") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a number of JSON")
    return number


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if error.status in (401, 403):
        _log.warning("the model endpoint rejected a call: %s", error)
    if error.status == 401:
        # An agent that was left behind may never stop asking.
        await asyncio.sleep(REFUSAL_S)
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
    response = JSONResponse(dialect.whole(await call.answered()))
    call.delivered = True
    return response


async def _events(dialect: Dialect, call: Call) -> AsyncIterator[str]:
    # A client that disconnects before the last event, also while the reply is sampled, has not received it.
    whole = False
    try:
        try:
            *before, last = map(_event, dialect.events(await call.answered()))
        except RequestError as error:
            yield _event(dialect.refusal(error))
            return
        for event in before:
            yield event
        whole = call.delivered = True
        yield last
    finally:
        call.left = not whole and not call.delivered


def _event(value: Mapping[str, object] | str) -> str:
    """Return a server-sent event, with the name of its type if it has one."""
    if isinstance(value, str):
        return f"data: {value}\n\n"
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value, allow_nan=False)}\n\n"
