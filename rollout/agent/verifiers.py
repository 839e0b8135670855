"""An environment of the verifiers library as an agent: its rollout asks our endpoint, and its rewards are the score."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from configs.plugins import OwnCodeError
from envs.datasets.split import question_key
from envs.types import Task

try:
    import verifiers.v1 as vf
except ModuleNotFoundError as error:
    raise OwnCodeError(
        f"verifiers 0.4 is missing ({error}): uv pip install -r requirements-environments.in "
        "--override requirements-cpu.overrides"
    ) from error

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from rollout.agent.own import GivenTask

LOCAL = {"type": "subprocess"}
NO_CODE = {"id": "null"}
NAMES = frozenset({"idx", "id", "name", "description"})
"""What a task is called. The rest of its data makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    task: vf.Task
    config: vf.EnvConfig
    split: str | None

    @property
    def prompt(self) -> str:
        return str(self.task.data.prompt_text).strip()

    @property
    def made_of(self) -> str:
        """The same for tasks with the same prompt, but for case, spacing and punctuation, and the same data."""
        data = self.task.data.model_dump_json(exclude=NAMES | {"prompt"})
        return question_key(f"{question_key(self.prompt)} {data}")


class VerifiersEnvironment:
    """`tasks`, `solve` and `score` are what a recipe names as a data set's source, its agent and its scorer."""

    def __init__(
        self,
        taskset: str,
        *,
        arguments: Mapping[str, object] | None = None,
        evaluation: Mapping[str, object] | None = None,
        environment: Mapping[str, object] | None = None,
        num_tasks: int = 10_000,
        num_taught: int = 0,
        model: str = "policy",
    ) -> None:
        """`taskset` names an installed one, or a module beside the recipe, and `arguments` are its own.

        `evaluation` are the arguments that differ for the held-out tasks; the first `num_taught` others, and those that
        equal them, are then for a teacher. Without it the prompt's hash decides what a task is for, so that all tasks
        of one prompt are for the same; of tasks without a prompt it is their data's. `environment` is the rest of
        verifiers' own `[env]` table: `id` of a class that plays in turns, and a table for each seat. A seat plays on
        this machine, and where neither it nor the taskset names a harness, with `null`, which runs no code. At most
        `num_tasks` are loaded of each. `model` is `agent.model`.
        Raises OwnCodeError for what is not there, for several seats, and for a harness that would run the model's code
        unconfined.
        """
        self._num_tasks = num_tasks
        self._num_taught = num_taught
        self._model = model
        given = dict(arguments or {})
        self._train = _config(taskset, given, environment or {})
        self._held_out = _config(taskset, given | dict(evaluation), environment or {}) if evaluation else None

    @cached_property
    def _rows(self) -> list[_Row]:
        if self._held_out is None:
            return self._load(self._train, None)
        others = self._load(self._train, "train")
        held_out = self._load(self._held_out, "eval")
        _check_apart(others, held_out)
        taught = {row.made_of for row in others[: self._num_taught]}
        given = [replace(row, split="demonstrations") if row.made_of in taught else row for row in others]
        return [*given, *held_out]

    def _load(self, config: vf.EnvConfig, split: str | None) -> list[_Row]:
        loaded = vf.load_taskset(config.taskset).take(self._num_tasks)
        return [_Row(task=task, config=config, split=split) for task in loaded]

    def tasks(self) -> Iterator[dict[str, object]]:
        """Tables with the prompt as the question, and a number behind one that comes again. The answer stands in the
        environment alone: the one here is what `score` takes for right. Raises OwnCodeError for a task that is trained
        on and held out."""
        seen: set[str] = set()
        for number, row in enumerate(self._rows):
            label = row.prompt or row.config.env_id
            key = question_key(label)
            question = f"{label} [{number}]" if key in seen else label
            table = {"id": number, "question": question, "answer": _told(1.0, ""), "split": row.split}
            if row.split is None and (key in seen or not row.prompt):
                table["kept_with"] = row.prompt or row.made_of
            seen.add(key)
            yield table

    async def solve(self, task: "GivenTask", client: "AsyncOpenAI") -> str:
        """Plays one episode. The answer is JSON with `reward` and `reply`, the last that the model said.

        Raises RuntimeError where the episode failed, and so leaves the attempt unscored.
        """
        row = self._rows[int(task.id.rpartition("-")[2])]
        environment = vf.load_environment(row.config)
        async with environment.serving():
            episode = await environment.run_episode(row.task, self._context(client))
        if not episode.ok:
            errors = [*episode.errors, *chain.from_iterable(trace.errors for trace in episode.traces)]
            raise RuntimeError("; ".join(f"{one.type}: {one.message}" for one in errors) or "the episode has no end")
        if len(episode.traces) != 1:
            raise RuntimeError(f"{row.config.env_id} played {len(episode.traces)} agents; one can be trained")
        [trace] = episode.traces
        return _told(trace.reward, trace.last_reply)

    def _context(self, client: "AsyncOpenAI") -> vf.ModelContext:
        """The attempt's key is a header here: verifiers reads keys from the process' environment, which all share."""
        endpoint = vf.EvalClientConfig(base_url=str(client.base_url), headers={"x-api-key": client.api_key})
        return vf.ModelContext(model=self._model, client=endpoint, sampling=vf.SamplingConfig())

    def score(self, task: Task, answer: str) -> float:
        """The episode's reward, the sum of its weighted rewards."""
        return float(json.loads(answer)["reward"])


def _check_apart(others: Sequence[_Row], held_out: Sequence[_Row]) -> None:
    """A prompt may be on both sides, of tasks that differ in what the model is not told at first: the number that it
    guesses, the world that it acts in. Raises OwnCodeError for one task that is."""
    met = {row.made_of for row in others}
    for row in held_out:
        if row.made_of in met:
            raise OwnCodeError(
                f"{row.config.env_id}: the task {row.prompt!r:.80} is trained on and held out, with the same data; "
                "give `evaluation` arguments that load other tasks"
            )


def _told(reward: float, reply: str) -> str:
    return json.dumps({"reward": reward, "reply": reply}, ensure_ascii=False)


def _config(taskset: str, arguments: Mapping[str, object], environment: Mapping[str, object]) -> vf.EnvConfig:
    """Raises OwnCodeError."""
    table = {**environment, "taskset": {"id": taskset, **arguments}}
    try:
        fields = vf.env_config_type(taskset, str(environment.get("id", ""))).model_fields
        default = vf.default_harness_id(taskset)
        for name, field in fields.items():
            if isinstance(field.default, vf.AgentConfig):
                table[name] = _seat(environment.get(name), field.default, default)
        config = vf.resolve_env_config(table)
        vf.import_taskset(taskset)
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        said = " ".join(str(error.__cause__ or error).split())[:300]
        raise OwnCodeError(f"verifiers has no taskset '{taskset}' that takes {dict(arguments)}: {said}") from error
    seats = config.agent_harnesses()
    if len(seats) > 1:
        raise OwnCodeError(f"{config.env_id} has {len(seats)} agents ({', '.join(seats)}); one can be trained")
    for name, harness in seats.items():
        _check_confined(name, vf.load_harness(harness), getattr(config, name).runtime)
    return config


def _seat(given: object, declared: vf.AgentConfig, default: str) -> dict[str, object]:
    seat = {"runtime": LOCAL, **(given if isinstance(given, Mapping) else {})}
    if declared.harness is None and default == "bash":
        seat.setdefault("harness", NO_CODE)
    return seat


def _check_confined(seat: str, harness: vf.Harness, runtime: object) -> None:
    """Raises OwnCodeError."""
    if harness.EXECUTES_CODE and isinstance(runtime, vf.SubprocessConfig):
        raise OwnCodeError(
            f"environment.{seat}: the harness '{harness.config.id}' runs the model's code, here without a wall around "
            "it; give the seat a runtime of type docker, or the harness 'null'"
        )
