"""An environment of the verifiers library as a custom agent: its rollouts call our endpoint, its rewards are scores."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from configs.plugins import OwnCodeError
from envs.datasets.rows import question_key
from envs.types import Task, ToolUnavailableError

try:
    import verifiers.v1 as vf
except ModuleNotFoundError as error:
    raise OwnCodeError(
        f"verifiers 0.4 is missing ({error}): uv pip install -r requirements-environments.in "
        "--override requirements-cpu.overrides"
    ) from error

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from rollout.agent.custom import GivenTask

LOCAL = {"type": "subprocess"}
NO_CODE = {"id": "null"}
NAMES = frozenset({"idx", "id", "name", "description"})
"""Fields of a task's data that only name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    task: vf.Task
    config: vf.EnvConfig
    split: str | None

    @property
    def prompt(self) -> str:
        return str(self.task.data.prompt_text).strip()

    @property
    def content_key(self) -> str:
        """A key that equal tasks share: the same data, and the same prompt up to case, spacing and punctuation."""
        data = self.task.data.model_dump_json(exclude=NAMES | {"prompt"})
        return question_key(f"{question_key(self.prompt)} {data}")


class VerifiersEnvironment:
    """A recipe names `tasks` as a data set's source, `solve` as its agent, and `score` as its scorer."""

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
        """Load a taskset that is installed, or a module beside the recipe.

        Args:
            taskset: Its name.
            arguments: Its arguments.
            evaluation: The arguments that differ for held-out tasks. Without them a hash of the prompt, or of the data
                without one, decides which tasks are held out.
            environment: The rest of verifiers' `[env]` table. A seat runs on this machine, by default with the harness
                `null`, which runs no code.
            num_tasks: The number of tasks to load at most, for training and for evaluation.
            num_taught: With `evaluation`, the number of training tasks, the first ones, that are for a teacher.
            model: `agent.model` of the recipe.

        Raises OwnCodeError, also for several seats and for a harness that runs the model's code without a sandbox.
        """
        self._num_tasks, self._num_taught = num_tasks, num_taught
        self._model = model
        shared = dict(arguments or {})
        self._train = _config(taskset, shared, environment or {})
        self._held_out = _config(taskset, shared | dict(evaluation), environment or {}) if evaluation else None

    @cached_property
    def _rows(self) -> list[_Row]:
        if self._held_out is None:
            return self._load(self._train, None)
        train = self._load(self._train, "train")
        taught = [replace(row, split="demonstrations") for row in train[: self._num_taught]]
        return [*taught, *train[self._num_taught :], *self._load(self._held_out, "eval")]

    def _load(self, config: vf.EnvConfig, split: str | None) -> list[_Row]:
        return [
            _Row(task=one, config=config, split=split) for one in vf.load_taskset(config.taskset).take(self._num_tasks)
        ]

    def tasks(self) -> Iterator[dict[str, object]]:
        """Yield a table per task, with the prompt as its question; a repeated prompt gets a number.

        Its answer is what `score` accepts as right. Equal tasks are kept in one part, since tasks with equal prompts
        may differ in data that the model does not see at first.
        """
        seen: set[str] = set()
        for number, row in enumerate(self._rows):
            label = row.prompt or row.config.env_id
            key = question_key(label)
            question = f"{label} [{number}]" if key in seen else label
            kept_with = row.content_key if row.split or not row.prompt else row.prompt
            seen.add(key)
            columns = {"id": number, "question": question, "answer": _answer(1.0, "")}
            yield columns | {"split": row.split, "kept_with": kept_with}

    async def solve(self, task: "GivenTask", client: "AsyncOpenAI") -> str:
        """Play one episode; return JSON of its reward and last reply. Raises ToolUnavailableError for a failed one."""
        row = self._rows[int(task.id.rpartition("-")[2])]
        environment = vf.load_environment(row.config)
        # verifiers reads keys from the environment of the process, which all attempts share, so the key is a header.
        endpoint = vf.EvalClientConfig(base_url=str(client.base_url), headers={"x-api-key": client.api_key})
        context = vf.ModelContext(model=self._model, client=endpoint, sampling=vf.SamplingConfig())
        async with environment.serving():
            episode = await environment.run_episode(row.task, context)
        if not episode.ok:
            errors = [*episode.errors, *chain.from_iterable(trace.errors for trace in episode.traces)]
            said = "; ".join(f"{one.type}: {one.message}" for one in errors)
            raise ToolUnavailableError(said or "the episode has no end")
        if len(episode.traces) != 1:
            raise ToolUnavailableError(f"{row.config.env_id} played {len(episode.traces)} agents; one can be trained")
        [trace] = episode.traces
        return _answer(trace.reward, trace.last_reply)

    def score(self, task: Task, answer: str) -> float:
        """Return the episode's reward, the sum of its weighted rewards."""
        return float(json.loads(answer)["reward"])


def _answer(reward: float, reply: str) -> str:
    return json.dumps({"reward": reward, "reply": reply}, ensure_ascii=False)


def _config(taskset: str, arguments: Mapping[str, object], environment: Mapping[str, object]) -> vf.EnvConfig:
    table: dict[str, Any] = {**environment, "taskset": {"id": taskset, **arguments}}
    try:
        fields = vf.env_config_type(taskset, str(environment.get("id", ""))).model_fields
        default = vf.default_harness_id(taskset)
        for name, field in fields.items():
            if isinstance(field.default, vf.AgentConfig):
                no_code = field.default.harness is None and default == "bash"
                table[name] = {"runtime": LOCAL, **({"harness": NO_CODE} if no_code else {}), **table.get(name, {})}
        config = vf.resolve_env_config(table)
        vf.import_taskset(taskset)
    except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as error:
        cause = " ".join(str(error.__cause__ or error).split())[:300]
        raise OwnCodeError(f"verifiers has no taskset '{taskset}' that takes {dict(arguments)}: {cause}") from error
    seats = config.agent_harnesses()
    if len(seats) > 1:
        raise OwnCodeError(f"{config.env_id} has {len(seats)} agents ({', '.join(seats)}); one can be trained")
    for name, harness_config in seats.items():
        harness = vf.load_harness(harness_config)
        if harness.EXECUTES_CODE and isinstance(getattr(config, name).runtime, vf.SubprocessConfig):
            raise OwnCodeError(
                f"environment.{name}: the harness '{harness.config.id}' would run the model's code on this machine "
                "without a sandbox; give the seat a runtime of type docker, or the harness 'null'"
            )
    return config
