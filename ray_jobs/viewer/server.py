"""`agentflow view`: a local web page that shows runs, also during training. It writes nothing."""

import html
import logging
import tempfile
import threading
import webbrowser
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.api_keys import LOOPBACK_HOSTS, without_secrets
from configs.errors import UserError
from envs.serving import LOOPBACK, TokenGate, listen, new_token, with_token
from envs.tools.guard import raised
from ray_jobs.viewer.run import Asked, Row, ViewedRun, paired

_log = logging.getLogger(__name__)
STATIC = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def build_app(runs: Sequence[ViewedRun], token: str) -> ASGIApp:
    """Return the server of one or two runs, which requires the token.

    All static files are read now, so that a request cannot name any other. Foreign host names are rejected, so that no
    web page reaches the run by DNS rebinding.
    """
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _TYPES}
    answers: dict[str, Callable[[Asked], object]] = {
        "state": lambda asked: [run.state() for run in runs],
        "about": lambda asked: [run.about() for run in runs],
        "metrics": lambda asked: runs[asked.run].metrics.rows,
        "trajectories": lambda asked: runs[asked.run].page(asked),
        "trajectory": lambda asked: runs[asked.run].trajectory(asked.id),
        "groups": lambda asked: runs[asked.run].groups(asked),
        "group": lambda asked: runs[asked.run].group(asked.id),
        "pairs": lambda asked: _pairs(runs, asked),
    }
    lock = threading.Lock()

    async def static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            raise HTTPException(404, "the viewer has no such file")
        return Response(files[name], media_type=_TYPES[Path(name).suffix])

    def answer(request: Request) -> Response:
        # Starlette calls it in a thread, because it reads files.
        if (name := request.path_params["name"]) not in answers:
            raise HTTPException(404, "the viewer has no such answer")
        try:
            asked = msgspec.convert(dict(request.query_params), Asked, strict=False)
        except msgspec.ValidationError as error:
            raise HTTPException(400, str(error)) from None
        if asked.run >= len(runs):
            raise HTTPException(404, f"run {asked.run} is not shown, there are {len(runs)}")
        try:
            with lock:
                for run in runs:
                    run.refresh()
                found = answers[name](asked)
                if found is None:
                    raise HTTPException(404, "the run has no such id")
                return _json(found)
        except HTTPException:
            raise
        except Exception as error:
            _log.warning("the viewer cannot answer '%s'", name, exc_info=True)
            text = str(error) if isinstance(error, UserError) else raised(error)
            raise HTTPException(422, f"the files of the run cannot be shown here: {text}") from None

    app = Starlette(
        routes=[Route("/", static), Route("/static/{name}", static), Route("/api/{name}", answer)],
        middleware=[
            Middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK_HOSTS),
            Middleware(TokenGate, token=token, open_paths=("/static/",)),
        ],
        exception_handlers={HTTPException: _refused},  # type: ignore[dict-item]
    )

    async def with_headers(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await app(scope, receive, send_with_headers)

    # Outside of all other layers, so that rejected and failed requests are answered with the headers too.
    return with_headers


async def _refused(request: Request, error: HTTPException) -> Response:
    return _json({"error": error.detail}, status=error.status_code)


def _json(value: object, status: int = 200) -> Response:
    # Numbers that JSON cannot represent become null.
    content = without_secrets(msgspec.json.encode(value).decode())
    return Response(content, status_code=status, media_type="application/json")


def _pairs(runs: Sequence[ViewedRun], asked: Asked) -> Row:
    sides = []
    for name, side in (("left", asked.left), ("right", asked.right)):
        # `0:eval_after` are the attempts of this phase in the first run.
        number, _, phase = side.partition(":")
        if number not in map(str, range(len(runs))):
            raise HTTPException(400, f"{name} must be RUN:PHASE, such as 0:eval_after")
        sides.append(runs[int(number)].phase_attempts(phase))
    pairs = paired(*sides)
    found = [
        pair
        for pair in pairs
        if asked.only in ("", pair["kind"]) and asked.finds(f"{pair['task']}\n{pair['left']['question']}")
    ]
    return {"counts": Counter(pair["kind"] for pair in pairs), **asked.page(found)}


def run_view(folders: Sequence[Path], *, port: int, browser: bool) -> None:
    """Serve until interrupted; without folders the newest run below runs/.

    Raises UserError for a folder without a run or a used port.
    """
    import uvicorn

    if len(folders) > 2:
        raise UserError(f"at most 2 runs can be shown, got {len(folders)}")
    if not folders:
        newest = max(Path("runs").glob("*/config.json"), key=lambda file: file.stat().st_mtime, default=None)
        if newest is None:
            raise UserError("no run was found below runs/; name the folder of one")
        folders = [newest.parent]
    runs = [ViewedRun(folder) for folder in folders]
    with listen(port) as listener:
        token = new_token()
        address = with_token(f"http://{LOOPBACK}:{listener.getsockname()[1]}/", token)
        config = uvicorn.Config(build_app(runs, token), log_level="warning", timeout_graceful_shutdown=1)
        print(f"{' and '.join(map(str, folders))}: {address}   (Ctrl-C ends it)", flush=True)
        with door_to(address) as door:
            if browser:
                threading.Timer(0.3, webbrowser.open, [door]).start()
            uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def door_to(address: str) -> Iterator[str]:
    """Yield the URL of a file that leads to the address; all users see the browser's command, but not this file."""
    page = '<!doctype html><meta charset="utf-8"><title>AgentFlow viewer</title>'
    with tempfile.TemporaryDirectory(prefix="agentflow-view-") as folder:
        file = Path(folder) / "viewer.html"
        file.touch(mode=0o600)
        file.write_text(f'{page}<meta http-equiv="refresh" content="0; url={html.escape(address)}">')
        yield file.as_uri()
