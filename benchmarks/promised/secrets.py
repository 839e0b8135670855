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
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from benchmarks.planted_keys import KEYED, SERVER, SMALL, PlantedKeys, keyed_tools, plant, viewer_answers
from benchmarks.ray_machines import ROOT, Machines
from promised.promise import Measured, Promise
from ray_jobs import submit
from ray_jobs.cli import main
from ray_jobs.view import follow
from ray_jobs.view_run import ViewedRun

RECIPE = "configs/recipes/demo_cpu.toml"
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
        refused, places = _refused(keys, rng, folder), 8
        machines = Machines(folder, keys.variables)
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
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(machines.token_path)
    settings = [RECIPE, "name=planted", "num_steps=1", f"output_dir={folder}/runs", *SMALL, *keyed_tools(pages)]
    return _run(["submit", *settings, "--phase", "train", "--follow", "--address", machines.dashboard])


def _run(command: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(command)
    return code, said.getvalue()


@contextmanager
def _pages():
    """The address of a server that quotes the key that it is sent."""
    with subprocess.Popen([sys.executable, str(SERVER), "hostile_pages"], stderr=subprocess.PIPE, text=True) as server:
        try:
            yield server.stderr.readline().split()[-1]
        finally:
            server.kill()


def viewer_token(seed: int) -> Measured:
    """The command itself, asked with and without what it printed."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="agentflow-") as folder:
        word = f"word{rng.getrandbits(64):x}"
        _write(Path(folder), range(NUM_ROWS), range(NUM_ROWS), word)
        command = [sys.executable, "-m", "ray_jobs.cli", "view", folder, "--port", "0", "--no-browser"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                address = re.search(r"http://\S+", server.stdout.readline())[0]
                base, _, token = address.partition("?token=")
                wrong = "".join(rng.sample(token, len(token)))
                strange = {"Origin": f"http://127.0.0.1:{rng.randint(1024, 65535)}", "Authorization": f"Bearer {token}"}
                asked = 0
                shown = 0
                for path in ("", "api/state", "api/about", "api/metrics", "api/trajectories", f"api/trajectory?id={word}/1"):
                    join = "&" if "?" in path else "?"
                    for url, headers in (
                        (f"{base}{path}", {}),
                        (f"{base}{path}{join}token={wrong}", {}),
                        (f"{base}{path}", {"Authorization": f"Bearer {wrong}"}),
                        (f"{base}{path}", {"Cookie": f"token={token}"}),
                        (f"{base}{path}", strange),
                    ):
                        status, _ = _get(url, headers)
                        asked += 1
                        shown += status not in (401, 403)
                opened = _get(address, {})[0] == 200 and word in _get(f"{base}api/trajectories?token={token}", {})[1]
            finally:
                server.terminate()
    text = f"{asked} requests without the token or from another origin, {shown} answered; with it "
    return Measured(text + ("the run is shown" if opened else "nothing is shown"), opened and not shown and token != "")


def _get(url: str, headers: dict[str, str]) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def torn_line(seed: int) -> Measured:
    """A line is torn at random while the viewer follows the run, which then writes on."""
    rng = random.Random(seed)
    outcomes = []
    for torn in ("metrics.jsonl", "trajectories.jsonl"):
        with tempfile.TemporaryDirectory(prefix="agentflow-") as name:
            folder = Path(name)
            before = rng.randint(1, NUM_ROWS)
            _write(folder, range(before), range(before), "early")
            run = ViewedRun(folder)
            stop = follow([run])
            line = (folder / torn).read_bytes().splitlines()[0]
            with (folder / torn).open("ab") as file:
                file.write(line[: rng.randint(1, line.index(b'"turns"') if b'"turns"' in line else len(line) - 1)] + b"\n")
            _write(folder, range(before, NUM_ROWS), range(before, NUM_ROWS), "late")
            deadline = time.monotonic() + PATIENCE_S
            while run.state()["trajectories"] < NUM_ROWS and time.monotonic() < deadline:
                time.sleep(0.05)
            stop.set()
            state = run.state()
            outcomes.append([state[key] for key in ("metrics", "trajectories", "unreadable")])
    text = "; ".join(f"{rows} rows, {num} trajectories, {torn} unreadable" for rows, num, torn in outcomes)
    return Measured(f"{text} of {NUM_ROWS} and {NUM_ROWS}", outcomes == [[NUM_ROWS, NUM_ROWS, 1]] * 2)


def _write(folder: Path, steps: range, numbers: range, word: str) -> None:
    (folder / "config.json").write_text("{}")
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "wall_s": 1.0, "policy/loss": 0.1}) + "\n" for step in steps)
    with (folder / "trajectories.jsonl").open("a") as file:
        for number in numbers:
            head = {"id": f"{word}/{number}", "group_id": word, "phase": "train", "task_id": word, "question": word}
            file.write(json.dumps(head | {"reward": 1.0, "turns": []}) + "\n")


PROMISES = [
    Promise(
        name="planted-keys",
        said="No API key is written to the run folder, to Ray's logs or to the viewer.",
        where="docs/tools.md, docs/cluster.md",
        measure=planted_keys,
    ),
    Promise(
        name="viewer-token",
        said="Only who has the token of the printed address sees the run.",
        where="docs/viewer.md",
        measure=viewer_token,
    ),
    Promise(
        name="torn-line",
        said="A line that cannot be read is counted, and what follows it is shown.",
        where="docs/viewer.md",
        measure=torn_line,
    ),
]
