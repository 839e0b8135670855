"""A key stands in nothing that a run writes; a viewer shows a run to nobody without its token, and goes on after a torn
line."""

import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from benchmarks.promised.promise import Measured, Promise
from ray_jobs.cli import main
from ray_jobs.jobs import submit
from ray_jobs.viewer.run import ViewedRun
from ray_jobs.viewer.server import follow
from tests.faults.machines import Machines
from tests.ray_jobs.planted_keys import KEYED, ROOT, SERVER, SMALL, PlantedKeys, keyed_tools, plant, viewer_answers

RECIPE = "configs/recipes/prm_cpu.toml"
NUM_ROWS = 40
PATIENCE_S = 30.0


def planted_keys(seed: int) -> Measured:
    """A real job on a Ray cluster of its own, whose machine has the keys; engine and learner are simulated."""
    rng = random.Random(seed)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="agentflow-") as name:
        folder = Path(name)
        keys = plant(rng, folder / "keys")
        os.environ.update(keys.variables)
        machines = Machines(folder, keys.variables)
        # Ray reads a token once in a process, also for the commands that are refused.
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(machines.token_path)
        refused, places = _refused(keys, rng, folder), 8
        try:
            with _pages() as pages:
                machines.start_head(num_cpus=2)
                code, said = _submitted(machines, folder, pages)
            if code != 0:
                raise RuntimeError(f"the job failed: {said[-500:]}")
            run = folder / "runs" / "planted"
            asked = "[key] the MCP server" in (run / "trajectories.jsonl").read_text()
            found = keys.found_below([folder, machines.sessions])
            found += [f"output: {name}" for name in keys.found_in(said.encode())]
            found += [f"viewer: {name}" for name in keys.found_in(viewer_answers(run))]
            num_files = sum(one.is_file() for place in (folder, machines.sessions) for one in place.rglob("*"))
        finally:
            machines.stop()
    text = f"{len(keys.values)} keys, found in {found[:2] or 'none'} of {num_files} files, output and viewer; "
    text += f"{refused} of {places} settings with a key in them refused" + ("" if asked else "; NO tool was asked")
    return Measured(text, asked and not found and refused == places)


def _refused(keys: PlantedKeys, rng: random.Random, folder: Path) -> int:
    """How many of the settings with a key in them are refused, in words without it."""
    key = keys.values["COMMAND_KEY"]
    sources = [
        f"mcp:https://host/mcp?{rng.choice(('apiKey', 'api_key', 'token', 'access_token'))}={key}",
        f"mcp:https://{key}@host/mcp",
        f"mcp:npx server --{rng.choice(('api-key', 'token', 'secret'))} {key}",
        f"mcp:env SERVER_API_KEY={key} npx server",
        f"mcp:npx proxy https://host/mcp --header Authorization:{key}",
        f"mcp:npx server {key}",
    ]
    tool = "envs.tools={{t={{source={}, description='a tool'}}}}"
    added = folder / "environment.yaml"
    added.write_text(f"env_vars: {{SOME_TOKEN: {key}}}")
    commands = [
        *(["submit", RECIPE, tool.format(json.dumps(source))] for source in sources),
        ["submit", RECIPE, f"model.path=/models/{key}"],
        ["submit", RECIPE, "--runtime-env", str(added), "--address", "http://127.0.0.1:9"],
    ]
    said = [_run(command) for command in commands]
    added.unlink()
    return sum(code == 2 and "nothing listens" not in text and not keys.found_in(text.encode()) for code, text in said)


def _submitted(machines: Machines, folder: Path, pages: str) -> tuple[int, str]:
    submit.COMMAND = KEYED
    settings = [RECIPE, "name=planted", "num_steps=1", f"output_dir={folder}/runs", *SMALL, *keyed_tools(pages)]
    return _run(["submit", *settings, "--phase", "train", "--follow", "--address", machines.dashboard])


def _run(command: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(command)
    return code, said.getvalue()


@contextmanager
def _pages() -> Iterator[str]:
    """The address of a server that quotes the key that it is sent."""
    with subprocess.Popen([sys.executable, str(SERVER), "hostile_pages"], stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server.stderr.readline().split()[-1]
        finally:
            server.kill()


def viewer_token(seed: int) -> Measured:
    """The command itself, asked with and without what it printed."""
    rng = random.Random(seed)
    word = f"word{rng.getrandbits(64):x}"
    with tempfile.TemporaryDirectory(prefix="agentflow-") as folder:
        _write(Path(folder), range(NUM_ROWS), word)
        with _viewer(folder) as address:
            base, _, token = address.partition("?token=")
            wrong = "".join(rng.sample(token, len(token)))
            refused = [
                {},
                {"Authorization": f"Bearer {wrong}"},
                {"Cookie": f"token={token}"},
                {"Origin": f"http://127.0.0.1:{rng.randint(1024, 65535)}", "Authorization": f"Bearer {token}"},
            ]
            paths = ["", "api/state", "api/about", "api/metrics", "api/trajectories", f"api/trajectory?id={word}/1"]
            answers = [_get(f"{base}{path}", headers) for path in paths for headers in refused]
            answers += [_get(f"{base}?token={wrong}", {})]
            shown = sum(status not in (401, 403) or word in text for status, text in answers)
            opened = _get(address, {})[0] == 200 and word in _get(f"{base}api/trajectories?token={token}", {})[1]
    text = f"{len(answers)} requests without the token or from another origin, {shown} answered; with it the run is "
    return Measured(text + ("shown" if opened else "NOT shown"), opened and not shown)


@contextmanager
def _viewer(folder: str) -> Iterator[str]:
    command = [sys.executable, "-m", "ray_jobs.cli", "view", folder, "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield re.search(r"http://\S+", server.stdout.readline())[0]
        finally:
            server.terminate()


def _get(url: str, headers: dict[str, str]) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def torn_line(seed: int) -> Measured:
    """A line of each file is torn at random while the viewer follows the run, which then writes on."""
    rng = random.Random(seed)
    outcomes = [_after_torn_line(rng, name) for name in ("metrics.jsonl", "trajectories.jsonl")]
    text = "; ".join(f"{rows} rows, {num} trajectories, {torn} unreadable" for rows, num, torn in outcomes)
    return Measured(f"{text}, of {NUM_ROWS} each", outcomes == [(NUM_ROWS, NUM_ROWS, 1)] * 2)


def _after_torn_line(rng: random.Random, name: str) -> tuple[int, int, int]:
    """Rows, trajectories and unreadable lines that the viewer knows of in the end."""
    with tempfile.TemporaryDirectory(prefix="agentflow-") as folder:
        path, before = Path(folder) / name, rng.randint(1, NUM_ROWS - 1)
        _write(Path(folder), range(before), "early")
        run = ViewedRun(Path(folder))
        stop = follow([run])
        line = path.read_bytes().splitlines()[0]
        with path.open("ab") as file:
            # What stands before the turns of a trajectory is all that a list needs.
            file.write(line[: rng.randint(1, max(line.find(b', "turns"'), len(line) // 2))] + b"\n")
        _write(Path(folder), range(before, NUM_ROWS), "late")
        deadline = time.monotonic() + PATIENCE_S
        while (counts := _counts(run)) != (NUM_ROWS, NUM_ROWS, 1) and time.monotonic() < deadline:
            time.sleep(0.05)
        stop.set()
        return counts


def _counts(run: ViewedRun) -> tuple[int, int, int]:
    state = run.state()
    return state["metrics"], state["trajectories"], state["unreadable"]


def _write(folder: Path, numbers: range, word: str) -> None:
    """A row of metrics and a trajectory for each number."""
    (folder / "config.json").write_text("{}")
    with (folder / "metrics.jsonl").open("a") as metrics, (folder / "trajectories.jsonl").open("a") as trajectories:
        for number in numbers:
            head = {"id": f"{word}/{number}", "group_id": word, "phase": "train", "task_id": word, "question": word}
            trajectories.write(json.dumps(head | {"reward": 1.0, "turns": []}) + "\n")
            metrics.write(json.dumps({"step": number, "wall_s": 1.0, "policy/loss": 0.1}) + "\n")


PROMISES = [
    Promise(
        name="planted-keys",
        said="No API key is written to the run folder, to Ray's logs or to the viewer",
        where="docs/tools.md",
        measure=planted_keys,
    ),
    Promise(
        name="viewer-token",
        said="Only who has the token of the printed address sees the run",
        where="docs/viewer.md",
        measure=viewer_token,
    ),
    Promise(
        name="torn-line",
        said="A line that cannot be read is counted, and what follows it is shown",
        where="docs/viewer.md",
        measure=torn_line,
    ),
]
