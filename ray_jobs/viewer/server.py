"""`agentflow view`: a local web page that shows runs, also during training. It writes nothing."""

import html
import json
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.api_keys import LOOPBACK_HOSTS
from configs.errors import UserError
from envs.serving import LOOPBACK, TokenGate, listen, new_token, with_token
from ray_jobs.viewer.rows import Row
from ray_jobs.viewer.run import MAX_PAGE, ViewedRun, Wanted, paired

STATIC = Path(__file__).with_name("static")
Found = TypeVar("Found")
Answer = Callable[[Sequence[ViewedRun], Request], object]

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


def build_app(runs: Sequence[ViewedRun], token: str) -> Starlette:
    """Return the server of one or two runs, which requires the token.

    All static files are read now, so that a request cannot name any other file.
    """
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _TYPES}
    answers: dict[str, Answer] = {
        "state": lambda runs, request: [run.state() for run in runs],
        "about": lambda runs, request: [run.about() | {"facets": run.facets()} for run in runs],
        "metrics": lambda runs, request: _run(runs, request).metrics.rows,
        "trajectories": lambda runs, request: _run(runs, request).page(_wanted(request), *_page(request)),
        "trajectory": lambda runs, request: _found(_run(runs, request).trajectory(_id(request)), "trajectory"),
        "groups": lambda runs, request: _run(runs, request).groups(_wanted(request), *_page(request)),
        "group": lambda runs, request: _found(_run(runs, request).group(_id(request)), "group"),
        "pairs": _pairs,
    }
    return Starlette(
        routes=[
            Route("/", partial(_file, files, "index.html")),
            Route("/static/{name}", partial(_file, files, None)),
            *(Route(f"/api/{name}", partial(_answered, answer, runs)) for name, answer in answers.items()),
        ],
        middleware=[Middleware(LoopbackOnly), Middleware(TokenGate, token=token, open_paths=("/static/",))],
        exception_handlers={HTTPException: _refused},  # type: ignore[dict-item]
    )


class LoopbackOnly:
    """A middleware that rejects host names of other machines and adds security headers to each response.

    The check keeps web pages from reaching the run by DNS rebinding.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        name, colon, port = hosts[0].rpartition(":") if len(hosts) == 1 else ("", "", "")
        if len(hosts) == 1 and (name if colon and port.isdigit() else hosts[0]).lower() in LOOPBACK_HOSTS:
            await self._app(scope, receive, guarded)
        else:
            refusal = _json({"error": "this server answers only to 127.0.0.1 and localhost"}, status=421)
            await refusal(scope, receive, guarded)


async def _file(files: dict[str, bytes], name: str | None, request: Request) -> Response:
    name = name or request.path_params["name"]
    if name not in files:
        raise HTTPException(404, "the viewer has no such file")
    return Response(files[name], media_type=_TYPES[Path(name).suffix])


def _answered(answer: Answer, runs: Sequence[ViewedRun], request: Request) -> Response:
    # Starlette runs it in a thread, because it reads files.
    return _json(answer(runs, request))


async def _refused(request: Request, error: HTTPException) -> Response:
    return _json({"error": error.detail}, status=error.status_code)


def _json(value: object, status: int = 200) -> Response:
    try:
        text = _dumped(value)
    except ValueError:
        text = _dumped(finite(value))
    # Half a surrogate pair, which a model may write, has no UTF-8; it becomes a question mark.
    return Response(text.encode(errors="replace"), status_code=status, media_type="application/json")


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def finite(value: object) -> object:
    """Replace the numbers that JSON cannot represent by None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return value


def _pairs(runs: Sequence[ViewedRun], request: Request) -> object:
    sides: list[Mapping[str, Row]] = []
    for name in ("left", "right"):
        # `0:eval_after` are the attempts of this phase in the first run.
        number, _, phase = request.query_params.get(name, "").partition(":")
        if number not in map(str, range(len(runs))):
            raise HTTPException(400, f"{name} must be RUN:PHASE, such as 0:eval_after")
        sides.append(runs[int(number)].phase_attempts(phase))
    text = request.query_params.get("text", "").lower().strip()
    left, right = sides
    counts, pairs = paired(left, right, request.query_params.get("only", ""), text)
    offset, limit = _page(request)
    return {"counts": counts, "total": len(pairs), "rows": pairs[offset : offset + limit]}


def _id(request: Request) -> str:
    return request.query_params.get("id", "")


def _wanted(request: Request) -> Wanted:
    asked = request.query_params
    names = ("text", "phase", "verdict", "outcome", "dataset")
    return Wanted(
        **{name: asked.get(name, "") for name in names},
        step=_whole(request, "step", 0) if asked.get("step") else None,
        newest_first=asked.get("order") == "newest",
    )


def _page(request: Request) -> tuple[int, int]:
    return _whole(request, "offset", 0), min(_whole(request, "limit", 100), MAX_PAGE)


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise HTTPException(400, f"{name} must be a whole number of at most nine digits, got {text[:40]!r}")
    return int(text)


def _run(runs: Sequence[ViewedRun], request: Request) -> ViewedRun:
    number = _whole(request, "run", 0)
    if number >= len(runs):
        raise HTTPException(404, f"run {number} is not shown, there are {len(runs)}")
    return runs[number]


def _found(value: Found | None, kind: str) -> Found:
    if value is None:
        raise HTTPException(404, f"the run has no such {kind}")
    return value


REFRESH_S = 0.5
MOST_RUNS = 2


def run_view(folders: Sequence[Path], *, port: int, browser: bool) -> None:
    """Serve until interrupted. Raises UserError for a folder without a run or a used port."""
    import uvicorn

    if len(folders) > MOST_RUNS:
        raise UserError(f"at most {MOST_RUNS} runs can be shown, got {len(folders)}")
    runs = [ViewedRun(folder) for folder in folders]
    with listen(LOOPBACK, port) as listener:
        token = new_token()
        address = with_token(f"http://{LOOPBACK}:{listener.getsockname()[1]}/", token)
        follow(runs)
        server = uvicorn.Server(
            uvicorn.Config(build_app(runs, token), log_level="warning", timeout_graceful_shutdown=1)
        )
        print(f"{' and '.join(map(str, folders))}: {address}   (Ctrl-C ends it)", flush=True)
        with door_to(address) as door:
            if browser:
                threading.Timer(0.3, webbrowser.open, [door]).start()
            server.run(sockets=[listener])


@contextmanager
def door_to(address: str) -> Iterator[str]:
    """Yield the URL of a file that redirects to the address and that only this user can read.

    All users of a machine see the command that starts a browser, so the address must not be in it.
    """
    page = '<!doctype html><meta charset="utf-8"><title>AgentFlow viewer</title>'
    with tempfile.TemporaryDirectory(prefix="agentflow-view-") as folder:
        file = Path(folder) / "viewer.html"
        file.touch(mode=0o600)
        file.write_text(f'{page}<meta http-equiv="refresh" content="0; url={html.escape(address)}">')
        yield file.as_uri()


def follow(runs: Sequence[ViewedRun]) -> threading.Event:
    """Read new data of the runs in a thread until the returned event is set."""
    stop = threading.Event()

    def refresh() -> None:
        while True:
            for run in runs:
                # A file may be replaced at any moment; the next refresh finds it again.
                with suppress(OSError):
                    run.refresh()
            if stop.wait(REFRESH_S):
                return

    threading.Thread(target=refresh, daemon=True, name="view-refresh").start()
    return stop
