"""`agentflow view`: a page on this machine that shows a run, also while it trains."""

import html
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ray_jobs.view_run import ViewedRun, ViewError

LOOPBACK = "127.0.0.1"
REFRESH_S = 0.5
MOST_RUNS = 2


def run_view(folders: Sequence[Path], *, port: int, browser: bool) -> None:
    """Serve until interrupted. Raises ViewError for a folder that is no run's, or a port that is taken."""
    import uvicorn

    from envs.token_gate import new_token, with_token
    from ray_jobs.view_server import build_app

    if len(folders) > MOST_RUNS:
        raise ViewError(f"{len(folders)} runs were given; one is shown or {MOST_RUNS} are compared, so leave some out")
    runs = [ViewedRun(folder) for folder in folders]
    with _listener(port) as listener:
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
    """The URL of a file that leads a browser to the address and that only this user can read: all users of a machine
    see the command that starts a browser."""
    page = '<!doctype html><meta charset="utf-8"><title>AgentFlow viewer</title>'
    with tempfile.TemporaryDirectory(prefix="agentflow-view-") as folder:
        file = Path(folder) / "viewer.html"
        file.touch(mode=0o600)
        file.write_text(f'{page}<meta http-equiv="refresh" content="0; url={html.escape(address)}">')
        yield file.as_uri()


def follow(runs: Sequence[ViewedRun]) -> threading.Event:
    """Take in what the runs write, in a thread of its own, until the event that it returns is set."""
    stop = threading.Event()

    def refresh() -> None:
        while True:
            for run in runs:
                # A file may be replaced at any moment, and is there again the next time.
                with suppress(OSError):
                    run.refresh()
            if stop.wait(REFRESH_S):
                return

    threading.Thread(target=refresh, daemon=True, name="view-refresh").start()
    return stop


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ViewError(
            f"cannot listen on {LOOPBACK} port {port}: {reason}; choose another --port, 0 for any"
        ) from None
