"""The viewer's page in a headless browser: content, keyboard, accessibility and hostile text."""

import re
import socket
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from view_world import append, make_group, make_group_row, make_run, trained

from envs.serving import new_token, with_token
from envs.types import ToolCall, ToolResult
from ray_jobs.viewer.run import ViewedRun
from ray_jobs.viewer.server import build_app
from rollout.lifecycle import State
from tests.changed import replace
from tests.ray_jobs.browser import chromium

ARGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
PATIENCE_MS = 60_000
"""On a machine that is busy with other things."""


@pytest.fixture(scope="module")
def browser():
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium here: install one, as with `apt-get install chromium`")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGS.split(), timeout=PATIENCE_MS)
        yield browser
        browser.close()


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "demo")


@contextmanager
def served(*folders):
    """Yield the address of a viewer over these runs."""
    runs = [ViewedRun(folder) for folder in folders]
    listener = socket.create_server(("127.0.0.1", 0))
    token = new_token()
    server = uvicorn.Server(uvicorn.Config(build_app(runs, token), log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield with_token(f"http://127.0.0.1:{listener.getsockname()[1]}/", token)
    server.should_exit = True
    thread.join(10)
    listener.close()


@contextmanager
def page_of(browser, address, *, width=1280, height=800, scheme="light"):
    """Yield a new page, and fail on any error in it."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
    page.goto(address)
    page.wait_for_selector("#main h1, #main .problem", state="attached")
    yield page
    context.close()
    assert faults == []


HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    '"><svg onload=window.hacked=3> javascript:alert(1) \x00\x07\x1b[31m \u202egnirts \u2066\u200b '
)


def test_hostile_text_is_not_executed(browser, folder):
    rows = list(trained(make_group(7, question=HOSTILE), 4))
    append(folder / "trajectories.jsonl", rows)
    row = rows[0]
    row.turns[0].thought = row.turns[0].text = HOSTILE
    row.turns[0].tool_call = ToolCall(name=HOSTILE, arguments=HOSTILE)
    row.turns[0].tool_result = ToolResult(text=HOSTILE + "z" * 1_000_000)
    row.id, row.answer, row.task = "g000007/hostile <b>", HOSTILE, replace(row.task, answer=HOSTILE)
    append(folder / "trajectories.jsonl", [row])
    append(folder / "groups.jsonl", [make_group_row(7, State.TRAINED, 4)])
    with served(folder) as address, page_of(browser, f"{address}#/t/g000007%2Fhostile%20%3Cb%3E", height=1600) as page:
        page.wait_for_selector(".step")
        shown = page.locator("#main").inner_text()
        assert "<script>window.hacked = 1</script>" in shown
        assert "\u2400" in shown
        assert "\u27e8U+202E\u27e9" in shown
        assert "\u202e" not in shown
        assert len(shown) < 60_000
        page.get_by_role("button", name=re.compile("Show all 1,000,")).first.click()
        assert page.locator("#main").inner_text().count("z") >= 1_000_000
        page.goto(f"{address}#/trajectories?phase=any")
        page.get_by_text("<script>window.hacked").first.wait_for()
        page.goto(f"{address}#/group/g000007")
        page.wait_for_timeout(300)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main script, main img, main svg[onload]").count() == 0
