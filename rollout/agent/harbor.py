"""Tasks in Harbor's format as tasks, agent and reward: each attempt is a trial of Harbor's, which asks our endpoint."""

import asyncio
import hashlib
import json
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configs.plugins import OwnCodeError
from envs.datasets.split import question_key
from envs.types import Task
from rollout.agent.program import INHERITED, MAX_SAID, end_all

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from rollout.agent.own import GivenTask

PLACES = ("PATH", "HOME", "TMPDIR", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONFIG", "CONTAINER_HOST")
KNOWN = (*INHERITED, *PLACES, "HARBOR_TELEMETRY")
"""Variables of the worker that Harbor gets: where programs lie, where a container engine answers, and whether it
reports each trial to its makers, which is off where this is not set."""
INSTRUCTION = "instruction.md"
ENDING_S = 30.0
"""That a trial which is called off has to take down its containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    folder: Path
    instruction: str
    split: str | None


class HarborTasks:
    """`tasks`, `solve` and `score` are what a recipe names as a data set's source, its agent and its scorer."""

    def __init__(
        self,
        folder: str | Path,
        *,
        held_out: str | Path | None = None,
        agent: str = "terminus-2",
        options: Sequence[str] = (),
        variables: Sequence[str] = (),
        reward: str = "reward",
        model: str = "policy",
        program: str = "harbor",
    ) -> None:
        """`folder` holds tasks at any depth, each a folder with `task.toml` and `instruction.md`. Those of `held_out`
        are for evaluation; without it the instruction's hash decides what a task is for, so that all folders of one
        instruction are for the same.

        `agent` is one of Harbor's that asks the model from Harbor's own process, or `module:Class`; `options` are
        further words of `harbor run`. `variables` names what of the worker's environment Harbor gets besides
        KNOWN. `reward` is the number of the task's verifier that counts. `model` is `agent.model`; `program` is
        Harbor's, which has an environment of its own.
        Raises OwnCodeError where there is no such program, a folder has no task, or one task is in both.
        """
        found = shutil.which(program)
        if found is None:
            raise OwnCodeError(f"there is no program '{program}'; Harbor comes by `uv tool install harbor`")
        # The next attempt at a task needs its image again.
        self._words = (found, "run", "--yes", "--quiet", "--no-delete", "--agent", agent, "--model", f"openai/{model}")
        self._options = tuple(options)
        self._variables = (*KNOWN, *variables)
        self._reward = reward
        self._rows = [*_load(Path(folder).expanduser().absolute(), "train" if held_out else None)]
        if held_out:
            asked = [*_load(Path(held_out).expanduser().absolute(), "eval")]
            _check_apart(self._rows, asked)
            self._rows += asked

    def tasks(self) -> Iterator[dict[str, object]]:
        """Tables with the instruction as the question, and the folder's name behind one that comes again. What is right
        the task's verifier knows alone: the answer here is what `score` takes for right."""
        seen: set[str] = set()
        for number, row in enumerate(self._rows):
            key = question_key(row.instruction)
            question = f"{row.instruction} [{row.folder.name}]" if key in seen else row.instruction
            table = {"id": number, "question": question, "answer": json.dumps({self._reward: 1.0}), "split": row.split}
            if row.split is None and key in seen:
                table["kept_with"] = row.instruction
            seen.add(key)
            yield table

    async def solve(self, task: "GivenTask", client: "AsyncOpenAI") -> str:
        """Runs one trial, as a job of its own. The answer is JSON with what the task's verifier gave.

        Raises RuntimeError where the trial has no verdict, and so leaves the attempt unscored.
        """
        row = self._rows[int(task.id.rpartition("-")[2])]
        with tempfile.TemporaryDirectory(prefix="agentflow-trial-", ignore_cleanup_errors=True) as name:
            trials, output = Path(name) / "trials", Path(name) / "output"
            trials.mkdir()
            await self._trial(row.folder, trials, output, base_url=str(client.base_url), key=client.api_key)
            said = " ".join(output.read_text(errors="replace").split())[-MAX_SAID:]
            return json.dumps(_rewards(trials, said))

    async def _trial(self, task: Path, trials: Path, output: Path, *, base_url: str, key: str) -> None:
        """What Harbor prints goes into a file: a daemon that it leaves would hold a pipe open. Whatever it started ends
        with it."""
        with output.open("wb") as printed:
            process = await asyncio.create_subprocess_exec(
                *(*self._words, "--path", str(task), "--jobs-dir", str(trials), *self._options),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=printed,
                stderr=asyncio.subprocess.STDOUT,
                cwd=trials,
                env=self._environment(base_url, key),
                start_new_session=True,
            )
        try:
            await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=ENDING_S)
            raise
        finally:
            await asyncio.shield(asyncio.to_thread(end_all, process.pid, key))

    def _environment(self, base_url: str, key: str) -> dict[str, str]:
        kept = {name: os.environ[name] for name in self._variables if name in os.environ}
        return {
            "HARBOR_TELEMETRY": "off",
            **kept,
            "OPENAI_API_KEY": key,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "NO_PROXY": "127.0.0.1,localhost",
        }

    def score(self, task: Task, answer: str) -> float:
        """The verifier's number. Raises ValueError where it gave no such."""
        rewards = json.loads(answer)
        if self._reward not in rewards:
            raise ValueError(f"the task's verifier gave {sorted(rewards)} and no '{self._reward}'")
        return float(rewards[self._reward])


def _load(folder: Path, split: str | None) -> Iterator[_Row]:
    """Raises OwnCodeError."""
    places = sorted(found.parent for found in folder.rglob("task.toml"))
    if not places:
        raise OwnCodeError(f"'{folder}' has no task of Harbor's, no folder with a task.toml")
    for place in places:
        if tomllib.loads((place / "task.toml").read_text()).get("steps"):
            raise OwnCodeError(f"'{place}' has several steps, each with a reward; tasks of one step can be trained")
        instruction = place / INSTRUCTION
        if not instruction.is_file():
            raise OwnCodeError(f"'{place}' has no {INSTRUCTION}")
        yield _Row(folder=place, instruction=instruction.read_text().strip(), split=split)


def _check_apart(trained: Sequence[_Row], held_out: Sequence[_Row]) -> None:
    """An instruction may be in both folders, of tasks that differ in their other files: "Fix the bug." is asked of many
    a project. Raises OwnCodeError for one task that is."""
    shared = {question_key(row.instruction) for row in trained} & {question_key(row.instruction) for row in held_out}
    met = {_made_of(row): row.folder for row in trained if question_key(row.instruction) in shared}
    for row in held_out:
        if question_key(row.instruction) in shared and (same := met.get(_made_of(row))):
            raise OwnCodeError(
                f"'{row.folder}' is held out and '{same}' trained on, and they are one task; keep one of the folders"
            )


def _made_of(row: _Row) -> tuple[str, ...]:
    """The same for tasks with the same instruction, but for case, spacing and punctuation, and the same other files."""
    made = [question_key(row.instruction)]
    for file in sorted(row.folder.rglob("*")):
        if file.is_file() and file != row.folder / INSTRUCTION:
            with file.open("rb") as stream:
                made += [str(file.relative_to(row.folder)), hashlib.file_digest(stream, "sha256").hexdigest()]
    return tuple(made)


def _rewards(jobs: Path, said: str) -> object:
    """What the verifier gave in the one trial of the one job; an agent whose time was over has a verdict, too. Raises
    RuntimeError."""
    found = [*jobs.glob("*/*/result.json")]
    if not found:
        raise RuntimeError(f"Harbor made no trial: {said}")
    result: Mapping[str, Mapping[str, object] | None] = json.loads(found[0].read_text())
    verdict, failure = result.get("verifier_result") or {}, result.get("exception_info") or {}
    if not verdict.get("rewards"):
        kind, message = failure.get("exception_type", "no verdict"), str(failure.get("exception_message", ""))
        raise RuntimeError(f"{kind}: {' '.join(message.split())[-MAX_SAID:]}")
    return verdict["rewards"]
