"""The viewer's server: data of a run folder, and rejected requests."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient
from view_world import append, evaluation_row, make_run, metric_row

from configs.errors import UserError
from envs.serving import new_token, with_token
from ray_jobs.viewer.run import ViewedRun
from ray_jobs.viewer.server import build_app, door_to, run_view
from rollout.types import packed_floats

TOKEN = new_token()


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "runs" / "demo")


def client_of(*folders):
    app = build_app([ViewedRun(folder) for folder in folders], TOKEN)
    return TestClient(app, base_url="http://127.0.0.1:8770", headers={"authorization": f"Bearer {TOKEN}"})


def ask(client, name, **query):
    answer = client.get(f"/api/{name}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids(page):
    return [row["id"] for row in page["rows"]]


def test_rows_come_by_page_and_by_filter(folder):
    client = client_of(folder)
    everything = ask(client, "trajectories", limit=5)
    assert (everything["total"], len(everything["rows"])) == (19, 5)
    assert ids(ask(client, "trajectories", text="g000001/")) == ["g000001/0", "g000001/1", "g000001/2"]
    assert ids(ask(client, "trajectories", step=2, outcome="right")) == ["g000001/0"]
    assert ask(client, "trajectories", verdict="all_wrong")["total"] == 2
    newest = ask(client, "trajectories", text="CRATES OF IRON", phase="eval_after", order="newest")
    assert ids(newest)[0] == "eval_after/3"
    assert ask(client, "trajectories", text="no such thing")["total"] == 0
    changed = ask(client, "trajectories", phase="changed")["rows"]
    assert [row["id"] for row in changed] == ["eval_after/1", "eval_after/2"]
    assert [row["before"]["id"] for row in changed] == ["eval_before/1", "eval_before/2"]
    assert ids(ask(client, "groups", verdict="all_wrong,failed")) == ["g000003", "g000005"]
    assert ids(ask(client, "groups", text="older than", step=2)) == ["g000004"]


def test_trajectory_has_token_texts_siblings_and_other_attempts(folder):
    shown = ask(client_of(folder), "trajectory", id="g000000/0")
    first = shown["record"]["turns"][0]
    assert first["pieces"] == ["weigh", " search", " iron", " bolts"]
    assert first["learner_logprobs"] == pytest.approx([-0.1, -0.5, -0.9, -0.4])
    assert "prompt_token_ids" not in first
    assert [row["id"] for row in shown["siblings"]] == ["g000000/0", "g000000/1", "g000000/2"]
    assert {row["id"] for row in shown["attempts"]} >= {"eval_before/0", "eval_after/0"}
    assert shown["record"]["credit"]["scheme"] == "outcome_guided"


def test_rewound_run_is_read_again(folder):
    client = client_of(folder)
    assert ask(client, "state")[0]["trajectories"] == 19
    path = folder / "trajectories.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    os.truncate(path, sum(map(len, kept[:3])))
    state = ask(client, "state")[0]
    assert (state["trajectories"], state["generation"]) == (3, "1.0")
    assert client.get("/api/trajectory", params={"id": "eval_after/0"}).status_code == 404
    # Shortened again, and longer than before at the next look.
    path.write_text("".join([*kept[:2], *kept[4:12]]))
    state = ask(client, "state")[0]
    assert (state["trajectories"], state["generation"]) == (10, "2.0")


def test_another_question_with_the_same_id_is_not_paired(folder, tmp_path):
    """Rows of different custom files have the same ids."""
    path = make_run(tmp_path / "runs" / "other") / "trajectories.jsonl"
    path.write_text(path.read_text().replace("How many kg do 35 crates", "Who wrote 35 crates"))
    client = client_of(folder, path.parent)
    pairs = ask(client, "pairs", left="0:eval_after", right="1:eval_after")
    assert sorted(pair["task"] for pair in pairs["rows"]) == ["lookup-0", "lookup-2", "lookup-3"]


def test_values_that_json_cannot_represent(folder):
    attempt = evaluation_row(50, "eval_after", right=True)
    attempt.turns[0].logprobs = packed_floats([float("-inf"), float("nan")])
    attempt.answer = "half a pair: \ud800"
    append(folder / "trajectories.jsonl", [attempt])
    shown = ask(client_of(folder), "trajectory", id="eval_after/50")["record"]
    assert shown["turns"][0]["logprobs"] == [None, None]
    assert shown["answer"] == "half a pair: ?"


TORN = [
    *(b'{"step": 2, "policy/lo\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n"),
    *(b'{"wall_s": 1.0}\n', b'{"step": -1}\n', b'{"step": 2, "policy/loss": "x"}\n', b"null\n"),
]


@pytest.mark.parametrize("torn", TORN)
@pytest.mark.parametrize("name", ["metrics.jsonl", "groups.jsonl", "trajectories.jsonl"])
def test_torn_line_is_counted_and_later_lines_are_read(folder, name, torn):
    """As a disk leaves it that was full for a while; and a line that is no row of this log."""
    client = client_of(folder)
    assert ask(client, "state")[0]["unreadable"] == 0
    with (folder / name).open("ab") as file:
        file.write(torn)
    append(folder / "metrics.jsonl", [metric_row(4)])
    append(folder / "trajectories.jsonl", [evaluation_row(77, "eval_after", right=True)])
    state = ask(client, "state")[0]
    assert (state["trajectories"], state["metrics"], state["unreadable"]) == (20, 4, 1)
    assert ask(client, "trajectory", id="eval_after/77")["record"]["id"] == "eval_after/77"


def test_a_damaged_file_is_named_in_the_answer(folder):
    (folder / "config.json").write_bytes(b"{")
    answer = client_of(folder).get("/api/about")
    assert answer.status_code == 422
    assert "config.json" in answer.json()["error"]


FOREIGN = ("evil.example", "evil.example:8770", "127.0.0.1.evil.example", "localhost.evil", "127.0.0.2", "")
LOCAL = ("localhost:1", "127.0.0.1", "[::1]:8770", "LOCALHOST:8770")


@pytest.mark.parametrize("host", FOREIGN + LOCAL)
def test_foreign_host_names_are_rejected(folder, host):
    answer = client_of(folder).get("/api/about", headers={"host": host})
    assert answer.status_code == (200 if host in LOCAL else 400)
    assert ("demo" in answer.text) == (host in LOCAL)


@pytest.mark.parametrize("path", ["/", "/api/state", "/api/about", "/api/trajectory?id=g000000/0", "/nothing"])
def test_requests_without_the_token_are_rejected(folder, path):
    client = client_of(folder)
    del client.headers["authorization"]
    answer = client.get(path)
    assert answer.status_code == 401
    assert client.get(with_token("/", TOKEN)).status_code == 200
    assert client.get("/api/state", headers={"authorization": "Bearer other"}).status_code == 401
    # The files of the page, which a browser asks for without it, are the same for every run.
    assert client.get("/static/main.js").status_code == 200


def test_other_origins_and_methods_are_rejected(folder):
    client = client_of(folder)
    for origin in ("http://127.0.0.1:9999", "http://evil.example", "null"):
        assert client.get("/api/state", headers={"origin": origin}).status_code == 403
    assert client.post("/api/state").status_code == 405


def test_the_newest_run_is_shown_when_none_is_named(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="runs/"):
        run_view([], port=0, browser=False)
    monkeypatch.chdir(folder.parent.parent)
    shutil.copytree(folder, folder.with_name("older"))
    os.utime(folder.with_name("older") / "config.json", (1e9, 1e9))
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    run_view([], port=0, browser=False)
    assert capsys.readouterr().out.startswith(f"{Path('runs', 'demo')}: ")


def test_browser_command_does_not_show_the_token():
    address = with_token("http://127.0.0.1:8770/", TOKEN)
    with door_to(address) as door:
        file = Path(urlsplit(door).path)
        assert TOKEN not in door
        assert f"url={address}" in file.read_text()
        assert (file.stat().st_mode & 0o077, file.parent.stat().st_mode & 0o077) == (0, 0)
    assert not file.exists()


def test_responses_have_security_headers(folder):
    """Also those that the router, the token gate or the host check rejects."""
    client, paths = client_of(folder), ("/", "/static/main.js", "/api/state", "/api/trajectory?id=none", "/nothing")
    rejected = [client.get("/", headers=wrong) for wrong in ({"authorization": "no"}, {"host": "evil.example"})]
    assert [answer.status_code for answer in rejected] == [401, 400]
    for headers in (answer.headers for answer in (*map(client.get, paths), *rejected)):
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert {"default-src 'none'", "script-src 'self'"} <= set(policy.split("; "))
        assert "unsafe" not in policy


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../view.py", "/static/%2e%2e%2fview.py", "/static/..%2f..%2fpyproject.toml", "/static//etc/passwd"),
        *("/../config.json", "/api/trajectory?id=../../secret", "/api/group?id=%2Fetc%2Fpasswd", "/config.json"),
    ],
)
def test_path_traversal_opens_no_file(folder, path):
    (folder.parent / "secret").write_text("SECRET")
    answer = client_of(folder).get(path)
    assert answer.status_code == 404
    assert not re.search("SECRET|root:", answer.text)


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("trajectories?offset=-1", "offset"),
        ("trajectories?limit=many", "limit"),
        ("metrics?run=7", "run"),
        ("trajectories?offset=9999999999", "offset"),
        ("trajectories?limit=%D9%A3", "limit"),
        ("pairs?left=7:eval_after&right=0:eval_after", "left"),
    ],
)
def test_invalid_parameters_are_rejected_by_name(folder, query, name):
    answer = client_of(folder).get(f"/api/{query}")
    assert answer.status_code in (400, 404)
    assert name in answer.json()["error"]


def test_page_size_is_bounded(folder):
    append(folder / "trajectories.jsonl", (evaluation_row(number, "eval_after", right=True) for number in range(600)))
    assert len(ask(client_of(folder), "trajectories", limit=999_999_999)["rows"]) == 500


STATIC = Path(__file__).parents[2] / "ray_jobs" / "viewer" / "static"
PAGE = "{ location: { href: 'http://x/', hash: '', search: '', pathname: '/' }, localStorage: { getItem: () => null } }"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_modules_of_the_page_load_without_a_browser():
    """Where no Chromium is installed, nothing else would notice a name that is not defined."""
    modules = [str(path) for path in STATIC.glob("*.js") if path.name != "main.js"]
    script = f"Object.assign(globalThis, {PAGE}); for (const module of {json.dumps(modules)}) await import(module);"
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
