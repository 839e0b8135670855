"""The viewer's page in a headless browser: content, keyboard, accessibility and hostile text."""

import re
import socket
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from view_world import append, evaluation_row, make_group, make_run, metric_row, trained

from envs.serving import new_token, with_token
from envs.types import ToolCall, ToolResult
from ray_jobs.viewer.run import ViewedRun
from ray_jobs.viewer.server import build_app, door_to, follow
from tests.changed import replace
from tests.ray_jobs.browser import chromium

ARGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
ENDS = {"solve_rate": 0.0, "low": -0.1, "high": 0.1}
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
    stop = follow(runs)
    listener = socket.create_server(("127.0.0.1", 0))
    token = new_token()
    server = uvicorn.Server(uvicorn.Config(build_app(runs, token), log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield with_token(f"http://127.0.0.1:{listener.getsockname()[1]}/", token)
    stop.set()
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


def big_run(folder, num=20_000):
    make_run(folder)
    line = (folder / "trajectories.jsonl").read_bytes().splitlines(keepends=True)[0]
    line = line.replace(b"Iron bolts: 12 kg.", b"y" * 6000)
    with (folder / "trajectories.jsonl").open("ab") as file:
        file.writelines(line.replace(b"g000000", b"g%06d" % number) for number in range(10, 10 + num))
    return folder


def test_20000_trajectories_are_scrolled_page_by_page(browser, tmp_path):
    with served(big_run(tmp_path / "big")) as address, page_of(browser, f"{address}#/trajectories?phase=any") as page:
        pages = []
        page.on("response", lambda answer: pages.append(answer) if "/api/trajectories?" in answer.url else None)
        page.get_by_text("20,019 found").wait_for()
        page.locator(".vlist").evaluate("node => node.scrollTop = node.scrollHeight")
        page.get_by_text("g020009/0").wait_for()
        assert page.locator(".item").count() < 60
        assert 0 < len(pages) < 40
        assert all("limit=100" in one.url for one in pages)
        # Rows of a list, not the 6 kB of each trajectory.
        assert all(len(one.body()) < 100 * 1000 for one in pages)


HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    '"><svg onload=window.hacked=3> javascript:alert(1) \x00\x07\x1b[31m \u202egnirts \u2066\u200b '
)


def test_hostile_text_is_shown_as_text_and_not_run(browser, folder):
    rows = list(trained(make_group(7, question=HOSTILE), 4))
    append(folder / "trajectories.jsonl", rows)
    row = rows[0]
    row.turns[0].thought = row.turns[0].text = HOSTILE
    row.turns[0].tool_call = ToolCall(name=HOSTILE, arguments=HOSTILE)
    row.turns[0].tool_result = ToolResult(text=HOSTILE + "z" * 1_000_000)
    row.id, row.answer, row.task = "g000007/hostile <b>", HOSTILE, replace(row.task, answer=HOSTILE)
    append(folder / "trajectories.jsonl", [row])
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


def test_step_explains_its_advantage(browser, folder):
    """1 of 3 right: (1 - 0.333) / 0.577 = 1.155. Scores 0.905, 0.81 and twice 0.145: mean 0.501, deviation 0.413."""
    with served(folder) as address, page_of(browser, f"{address}#/t/g000000%2F0") as page:
        panel = page.locator(".credit").first.inner_text()
        assert "+1.643" in panel
        assert "(1 \u2212 0.333) / 0.577 = +1.155" in panel
        assert "0.05 + 0.95 \u00d7 0.900 = 0.905" in panel
        assert "0.500 \u00d7 (0.905 \u2212 0.501) / 0.413 = +0.489" in panel
        assert "above the mean 0.501 of all 4 scored steps of the group, whatever their action" in panel
        steps = page.locator(".step")
        assert steps.count() == 2
        second = page.locator(".credit").nth(1).inner_text()
        assert "Outcome: +1.155, as at every step of this attempt; step 1 has the formula." in second
        assert "Among the group's 3 answer steps, whose mean is 0.367, it is above." in second
        assert "made this very step" not in second
        assert "Executor: search" in steps.first.inner_text()
        page.locator(".tokens .tok").nth(1).click()
        assert "drift \u22120.3000" in page.locator(".token-detail").first.inner_text()
        assert page.locator(".tokens .tok").nth(2).get_attribute("class") == "tok down4"
        page.get_by_label("Tokens by").select_option("version")
        assert [page.locator(".tokens .tok").nth(at).get_attribute("class") for at in (0, 3)] == ["tok v1", "tok v2"]
        assert "colour=version" in page.url


def test_untrained_groups_show_their_reason(browser, folder):
    with served(folder) as address, page_of(browser, f"{address}#/group/g000003") as page:
        assert "none of the 2 attempts was right" in page.locator("#main").inner_text()
        for group, says in (("g000004", "older than version 3"), ("g000005", "2 of 2 infrastructure")):
            page.goto(f"{address}#/group/{group}")
            page.get_by_text(says).wait_for()
        page.goto(f"{address}#/t/g000003%2F0")
        page.get_by_text("every advantage is 0").wait_for()


def test_filters_are_part_of_the_address(browser, folder):
    with served(folder) as address, page_of(browser, f"{address}#/trajectories?phase=eval_after&outcome=wrong") as page:
        page.get_by_text("1 found").wait_for()
        page.get_by_label("Phase").select_option("any")
        page.get_by_text("12 found").wait_for()
        page.get_by_role("searchbox").fill("crates of nothing")
        page.get_by_text("0 found").wait_for()
        assert "text=crates+of+nothing" in page.url


def test_keyboard_navigation(browser, folder):
    with served(folder) as address, page_of(browser, address) as page:
        press = page.keyboard.press
        press("3")
        page.wait_for_selector(".item .row")
        press("/")
        page.keyboard.type("g00000")
        page.get_by_text("11 found").wait_for()
        press("Escape")
        for key in "jjk":
            press(key)
        assert page.evaluate("document.activeElement.textContent").startswith("g000000/0")
        press("Enter")
        page.wait_for_selector(".step")
        press("j")
        press("j")
        assert page.locator(".step.current h3").inner_text() == "Step 2"
        assert "step=2" in page.url
        press("]")
        page.get_by_text("g000000 / 1").wait_for()
        press("?")
        assert page.locator("dialog").is_visible()
        press("Escape")
        assert not page.locator("dialog").is_visible()
        press("Escape")
        page.get_by_role("heading", name="3 attempts").wait_for()
        press("t")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_new_rows_appear_on_an_open_page(browser, folder):
    with served(folder) as address, page_of(browser, f"{address}#/trajectories?phase=any", height=1600) as page:
        page.get_by_text("19 found").wait_for()
        page.evaluate("window.here = true")
        append(folder / "trajectories.jsonl", trained(make_group(9), 4))
        page.get_by_text("22 found").wait_for()
        page.get_by_text("g000009/0").wait_for()
        page.goto(f"{address}#/")
        page.get_by_text("3 of 3").wait_for()
        append(folder / "metrics.jsonl", [metric_row(4)])
        page.get_by_text("4 of 3").wait_for()
        assert page.evaluate("window.here")


PLACES = ("#/", "#/groups", "#/group/g000000", "#/trajectories", "#/t/g000000%2F0", "#/compare")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser, folder, scheme):
    from axe_playwright_python.sync_playwright import Axe

    pair = "#/pair?a=0:eval_before/1&b=0:eval_after/1"
    with served(folder) as address, page_of(browser, address, scheme=scheme) as page:
        for place in (*PLACES, pair):
            page.goto(f"{address}{place}")
            page.wait_for_timeout(500)
            found = Axe().run(page).response["violations"]
            serious = [
                (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
            ]
            assert serious == [], place


def test_phone_needs_no_horizontal_scrolling(browser, folder):
    append(folder / "trajectories.jsonl", trained(make_group(7, question="w" * 4000), 4))
    long = "#/t/g000007%2F0"
    with served(folder) as address, page_of(browser, address, width=375, height=720) as page:
        for place in (*PLACES, long, "#/group/g000007", "#/pair?a=0:eval_before/1&b=0:eval_after/1"):
            page.goto(f"{address}{place}")
            page.wait_for_timeout(400)
            assert page.evaluate("document.documentElement.scrollWidth") <= 375, place


def test_trajectories_open_on_what_rl_changed(browser, folder):
    with served(folder) as address, page_of(browser, f"{address}#/trajectories") as page:
        page.get_by_text("2 found").wait_for()
        first = page.locator(".item .row").first.inner_text()
        assert "gained" in first
        assert "after RL" in first
        assert "99" in first
        assert "408" in first
        page.get_by_label("Phase").select_option("any")
        page.get_by_text("19 found").wait_for()


def test_evaluations_while_training_have_a_chart(browser, folder):
    rates = {"": 0.5, "/lookup": 0.25, "/branch": 0.75}
    row = {f"held_out/{kind}{name}": rate + more for name, rate in rates.items() for kind, more in ENDS.items()}
    append(folder / "metrics.jsonl", [{"step": 2, "wall_s": 1.0, **row}])
    with served(folder) as address, page_of(browser, address) as page:
        chart = page.locator(".plot", has_text="Held-out tasks solved while training")
        assert chart.locator(".reading").inner_text().split("\n") == ["all 50.0%", "lookup 25.0%", "branch 75.0%"]
        chart.locator(".whisker").first.wait_for(state="attached")
        assert chart.locator(".whisker").count() == 3


def test_group_shows_the_tree_of_its_attempts(browser, folder):
    with served(folder) as address, page_of(browser, f"{address}#/group/g000000") as page:
        cells = page.locator(".matrix .move")
        assert [cells.nth(at).get_attribute("colspan") for at in range(cells.count())] == ["1", "2", "1"]
        guess = cells.nth(1).inner_text()
        assert "answer 99" in guess
        assert "\u25bc" in guess
        assert "\u00d7 2" in guess
        cells.nth(0).get_by_role("link").click()
        page.wait_for_selector(".step.current")
        assert "step=1" in page.url


def test_two_runs_share_the_curves(browser, folder, tmp_path):
    other = make_run(tmp_path / "other", num_steps=5)
    append(other / "trajectories.jsonl", [evaluation_row(9, "eval_after", right=True)])
    with served(folder, other) as address, page_of(browser, address) as page:
        reading = page.locator(".plot .reading").first.inner_text()
        assert "demo" in reading
        assert "other" in reading
        page.goto(f"{address}#/trajectories?run=1&phase=any")
        page.get_by_text("26 found").wait_for()


def test_start_file_leads_to_the_page(browser, folder):
    with served(folder) as address, door_to(address) as door, page_of(browser, door) as page:
        page.get_by_text("demo", exact=True).first.wait_for()
        assert page.url.startswith(address)
