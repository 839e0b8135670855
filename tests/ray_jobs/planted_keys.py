"""Keys that are planted where a run takes them from, and the search for them in all that the run writes and answers."""

import base64
import json
import random
import string
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from starlette.testclient import TestClient

from ray_jobs.viewer.run import ViewedRun
from ray_jobs.viewer.server import build_app

ROOT = Path(__file__).parents[2]

SERVER = ROOT / "tests" / "envs" / "foreign_mcp_server.py"
KEYED = ("python", "tests/ray_jobs/keyed_agentflow.py")
"""Takes the place of `ray_jobs.submit.COMMAND`."""

SMALL = (
    *("envs.search=tavily", "cold_start.num_demonstrations=0", "evaluation.num_tasks=2", "reward.credit=outcome"),
    *("evaluation.num_untouched_tasks=1", "rollout.group_size=4", "batch_groups=2", "rollout.engine.num_threads=1"),
    *("learner.num_threads=1", "learner.checkpoint_every=1", "cluster.patience_s=300", "max_empty_batches=1000"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedKeys:
    """Values by the variable that holds them; those in `in_files` are read from a file below `folder`."""

    values: dict[str, str]
    in_files: frozenset[str]
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the machines."""
        files = {f"{name}_FILE": str(self._write(name)) for name in self.in_files}
        return files | {name: value for name, value in self.values.items() if name not in self.in_files}

    def found_in(self, content: bytes) -> list[str]:
        """The variables whose values stand in it, as they are or in base64."""
        found = []
        for name, value in self.values.items():
            if value.encode() in content or base64.b64encode(value.encode())[:-4] in content:
                found.append(name)
        return found

    def found_below(self, folders: Iterable[Path]) -> list[str]:
        """`path: variable` for every file that holds one, but for the files that were written to hold them."""
        found = []
        for path in (one for folder in folders for one in sorted(folder.rglob("*"))):
            if path.is_file() and not path.is_symlink() and self.folder not in path.parents:
                found += [f"{path}: {name}" for name in self.found_in(path.read_bytes())]
        return found

    def _write(self, name: str) -> Path:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        path = self.folder / name.lower()
        path.touch(mode=0o600)
        path.write_text(f"{self.values[name]}\n")
        return path


def plant(rng: random.Random, folder: Path) -> PlantedKeys:
    """Keys of every kind: of a built-in tool, of a command, of a URL, and one that no setting names."""
    letters = string.ascii_letters + string.digits
    names = ("TAVILY_API_KEY", "COMMAND_KEY", "URL_KEY", "UNRELATED_SECRET")
    values = {name: "".join(rng.choices(letters, k=rng.randint(16, 48))) for name in names}
    return PlantedKeys(values=values, in_files=frozenset(("URL_KEY",)), folder=folder)


def keyed_tools(pages: str) -> tuple[str, ...]:
    """Settings with two tools that quote the key which they were given: a command, and the page `quote` of a server."""
    tools = {
        "told": {"source": f"mcp:{sys.executable} {SERVER} stdio#key", "api_key_env": "COMMAND_KEY"},
        "paged": {"source": f"mcp:{pages}quote", "api_key_env": "URL_KEY"},
    }
    shown = ", ".join(
        f"{name}={{source={json.dumps(tool['source'])}, description='a tool', api_key_env='{tool['api_key_env']}'}}"
        for name, tool in tools.items()
    )
    return f"envs.tools={{{shown}}}", f"envs.actions={json.dumps(['search', *tools, 'answer'])}"


def viewer_answers(run: Path) -> bytes:
    """All that the viewer says of a run."""
    app, headers = build_app([ViewedRun(run)], "viewer"), {"authorization": "Bearer viewer"}
    client = TestClient(app, base_url="http://127.0.0.1", headers=headers)
    asked = ["", "api/state", "api/about", "api/metrics", "api/trajectories?limit=500", "api/groups?limit=500"]
    for kind, rows in (("trajectory", "trajectories"), ("group", "groups")):
        asked += [f"api/{kind}?id={quote(row['id'])}" for row in client.get(f"/api/{rows}?limit=500").json()["rows"]]
    answers = [client.get(f"/{path}") for path in asked]
    assert all(answer.status_code == 200 for answer in answers)
    return b"\n".join(answer.content for answer in answers)
