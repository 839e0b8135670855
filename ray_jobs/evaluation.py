"""Results of evaluations, and the identity of an evaluation: its policy, and what must be equal to compare policies."""

import asyncio
import hashlib
import json
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean

import msgspec

from configs.errors import UserError, reason
from configs.plugins import load_own
from configs.rollout import CommandAgentConfig, FunctionAgentConfig, PlannerAgentConfig
from configs.run import RunConfig
from envs.datasets.benchmarks import BENCHMARKS
from envs.types import Task
from learner.checkpoint import read_manifest
from ray_jobs.run.folder import TRAJECTORIES, write_json
from ray_jobs.run.model_folder import SMALL_FILES
from ray_jobs.run.origin import origin_of, provenance, saved_config
from ray_jobs.statistics import PairedComparison, compare_paired
from ray_jobs.viewer.pages import shown
from rollout.codec import Record, flat_record, read_trajectories
from rollout.engines.served import OllamaEngine
from rollout.files import file_digest, read_records
from rollout.filters import SOLVED
from rollout.model_files import weight_files

IDENTITY = "evaluation.json"
ITEMS = "items.jsonl"
_DIGEST = r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b"
NOT_RETRIEVED = ("think", "answer", "code", "base_generator")
"""Tools whose results do not come from outside. Those of all others are audited for leaks."""

Place = tuple[str, str]
"""The benchmark and the task id of an item."""


class _Turn(msgspec.Struct, frozen=True):
    role: str
    action: str | None
    result: str | None
    tool_error: str | None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an item under one seed: a line of items.jsonl, or the record of a greedy attempt in a run."""

    dataset: str
    task_id: str
    seed: int = 0
    question: str
    gold: str
    answer: str | None
    score: float | None = msgspec.field(name="reward")
    """The scorer's result, without a judge. None if the item is unscored."""
    f1: float | None = None
    """Credit for a part of the answer, if the benchmark has it."""
    judge_asked: bool = False
    judged: bool | None = None
    """The judge's verdict, if there is one."""
    stop_reason: str
    num_turns: int
    turns: tuple[_Turn, ...]

    @property
    def key(self) -> str:
        return f"{self.dataset}/{self.task_id}/{self.seed}"

    @property
    def place(self) -> Place:
        """The item under any seed."""
        return self.dataset, self.task_id

    @property
    def solved(self) -> bool:
        return self.score == SOLVED

    @property
    def broken(self) -> bool:
        """True if the engine or a tool failed at every attempt."""
        return self.stop_reason == "infrastructure"

    @property
    def unscored(self) -> bool:
        """True if the item enters no rate: it is broken, or a custom scorer could not score the answer."""
        return self.score is None

    @property
    def retrieved(self) -> tuple[str, ...]:
        """Tool results from outside. The error of a tool may quote the question, and retrieved nothing."""
        asked = (turn for turn in self.turns if turn.role == "planner" and turn.action not in NOT_RETRIEVED)
        return tuple(turn.result for turn in asked if turn.result and turn.tool_error is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of one policy."""

    items: tuple[Item, ...]

    @property
    def solved(self) -> dict[Place, float]:
        return means_by_item(self.items)

    @property
    def unscored(self) -> list[str]:
        return [item.key for item in self.items if item.unscored]

    def paired_with(self, after: "Evaluation", *, dataset: str | None = None) -> list[tuple[float, float]]:
        """Return both results of each item that both policies have scored, of all data sets or of one."""
        first, second = self.solved, after.solved
        return [(first[place], second[place]) for place in first if place in second and dataset in (None, place[0])]

    def compared_with(self, after: "Evaluation", *, dataset: str | None = None) -> PairedComparison | None:
        """Compare both policies on the items that both have scored. None without any."""
        pairs = self.paired_with(after, dataset=dataset)
        return compare_paired(*zip(*pairs, strict=True)) if pairs else None


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The content of evaluation.json."""

    policy: dict[str, object]
    fixed: dict[str, object]
    """What must be equal on both sides of a comparison."""
    num_results: int
    """Items times seeds."""
    provenance: dict[str, object]

    def differences(self, other: "Identity") -> list[str]:
        """Return the names of the fixed parts that differ."""
        return [name for name in self.fixed | other.fixed if self.fixed.get(name) != other.fixed.get(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvaluation(Evaluation):
    """An evaluation read back from its folder."""

    path: Path
    identity: Identity

    @property
    def name(self) -> str:
        return str(self.identity.policy["adapter"] or self.identity.policy["model"])


def identity_of(
    config: RunConfig, *, adapter: Path | None, model_path: Path | None, tasks: Sequence[Task], num_seeds: int
) -> Identity:
    """Return the identity of an evaluation. `model_path` is None if a server holds the model.

    Raises BackendError if the server does not answer, or UserError for a corrupt adapter.
    """
    policy, quantisation = _local_policy(config, adapter, model_path) if model_path else _served_policy(config)
    items = defaultdict[str, list[str]](list)
    for task in tasks:
        metadata = dict(task.metadata) if task.scorer and ":" in task.scorer else {}
        items[task.dataset].append(digest_of([task.id, task.question, task.answer, task.scorer, metadata]))
    rollout, memory, judge = config.rollout, config.planner.memory, config.evaluation.judge
    hints = memory.type != "none" and memory.in_evaluation
    limits = (rollout.max_turn_tokens, rollout.max_calls, rollout.episode_timeout_s, rollout.wall_timeout_s)
    sampling: tuple[object, ...] = (config.evaluation.temperature, *limits, rollout.engine.max_model_len)
    sampling += (rollout.engine.adapter_mode, rollout.count_failed, config.reward.timeout_s)
    if not isinstance(config.agent, PlannerAgentConfig):
        sampling += (rollout.temperature,)  # the only one that requests may name
    # Which tasks are asked does not change a tool.
    not_tools = {"mix", "datasets"}
    fixed: dict[str, object] = {
        "version": version("agentflow-ray"),
        "seeds": num_seeds,
        "quantisation": quantisation,
        "agent": digest_of(config.agent.model_dump(mode="json", exclude=set() if hints else {"memory"})),
        "envs": digest_of(config.envs.model_dump(mode="json", exclude=not_tools)),
        "sampling": digest_of(sampling),
        "judge": judge and digest_of([judge.model, judge.temperature, judge.num_votes]),
        "code": _custom_code(config, tasks),
        "items": {name: digest_of(sorted(rows)) for name, rows in sorted(items.items())},
    }
    num_results = len(tasks) * num_seeds
    return Identity(policy=policy, fixed=fixed, num_results=num_results, provenance=provenance(seed=config.seed))


def _served_policy(config: RunConfig) -> tuple[dict[str, object], str | None]:
    backend = config.backend
    assert backend.type != "vllm"
    installed = None
    if backend.type == "ollama":
        engine = OllamaEngine(backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed)
        installed = asyncio.run(engine.installed())
    digest = installed.digest if installed else None
    policy: dict[str, object] = {"backend": backend.type, "model": backend.model, "adapter": None}
    policy["model_digest"] = digest
    return policy, installed.details.quantization_level if installed and installed.details else None


def _local_policy(config: RunConfig, adapter: Path | None, model_path: Path) -> tuple[dict[str, object], str]:
    paths = sorted({*weight_files(model_path), *(path for one in SMALL_FILES for path in model_path.glob(one))})
    policy: dict[str, object] = {
        "backend": "vllm",
        "model": config.model.path,
        "model_digest": digest_of({path.name: file_digest(path) for path in paths}),
        "adapter": str(adapter) if adapter else None,
    }
    if adapter:
        manifest = read_manifest(adapter)
        policy["adapter_digest"] = manifest["files"]["adapter.safetensors"]
        policy["policy_version"] = manifest["policy_version"]
        policy["lora_alpha"] = config.model.lora_alpha
    return policy, config.rollout.engine.precision


def _custom_code(config: RunConfig, tasks: Sequence[Task]) -> dict[str, str]:
    """Return the digests of the custom source files, and of the data files that the settings name."""
    envs, agent = config.envs, config.agent
    tools = {name: tool for name, tool in envs.tools.items() if name in envs.actions and not tool.is_mcp}
    sources = {tool.source: f"envs.tools.{name}" for name, tool in tools.items()}
    sources |= {task.scorer: "scorer" for task in tasks if task.scorer and ":" in task.scorer}
    files = {envs.web.blocked_questions: envs.web.blocked_questions} if envs.web.blocked_questions else {}
    if isinstance(agent, FunctionAgentConfig):
        sources[agent.function] = "agent.function"
    if isinstance(agent, CommandAgentConfig):
        from rollout.agent.custom import Program

        files |= {str(path): str(path) for path in Program(agent.command, config.code_path).files}
    for source, key in sources.items():
        load_own(source, key=key)
        if path := getattr(sys.modules[source.partition(":")[0]], "__file__", None):
            files[source] = path
    return {name: file_digest(Path(path)) for name, path in files.items()}


def digest_of(value: object) -> str:
    """Return the SHA-256 digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def title_of(benchmark: str) -> str:
    """Return the title of a benchmark or data set."""
    return BENCHMARKS[benchmark].title if benchmark in BENCHMARKS else benchmark


def fact_rows(*identities: Identity) -> Iterator[tuple[str, ...]]:
    """Yield table rows: a name, and a column for each identity, with digests shortened."""
    for sides in ([one.policy for one in identities], [one.fixed for one in identities]):
        for name in dict.fromkeys(name for side in sides for name in side):
            yield name.replace("_", " "), *(re.sub(_DIGEST, r"\1", shown(side.get(name))) for side in sides)


def open_folder(path: Path, identity: Identity) -> set[str]:
    """Create the folder of an evaluation, or open it to continue; return the keys of the items that are done.

    Raises UserError for the folder of another evaluation, or of a training run, whose report would be overwritten.
    """
    if (path / "config.json").exists():
        raise UserError(f"'{path}' is the folder of a training run; name another folder with --out")
    path.mkdir(parents=True, exist_ok=True)
    if not (path / IDENTITY).exists():
        write_json(path / IDENTITY, msgspec.to_builtins(identity))
    known = _read_identity(path)
    if changed := [*(["policy"] if known.policy != identity.policy else []), *known.differences(identity)]:
        raise UserError(
            f"'{path}' holds an evaluation with another {', '.join(changed)}; use its settings to continue it, or "
            "another --out"
        )
    return {item.key for item in _items_in(path) if not item.broken}


def read_evaluation(path: Path) -> StoredEvaluation:
    """Read an evaluation. Raises UserError if there is none, or if results are missing."""
    identity, items = _read_identity(path), _items_in(path)
    if len(items) != identity.num_results:
        raise UserError(
            f"the evaluation in '{path}' has {len(items)} of {identity.num_results} results; run the same command "
            "again to finish it"
        )
    return StoredEvaluation(path=path, items=items, identity=identity)


def _read_identity(path: Path) -> Identity:
    try:
        return msgspec.json.decode((path / IDENTITY).read_bytes(), type=Identity)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"'{path}' holds no evaluation ({reason(error)}); name a folder that `agentflow evaluate` wrote"
        ) from error


def _items_in(path: Path) -> tuple[Item, ...]:
    return items_of(read_records(path / ITEMS) if (path / ITEMS).exists() else ())


def items_of(records: Iterable[Record]) -> tuple[Item, ...]:
    """Return the newest result of each item."""
    items = (msgspec.convert(record, Item) for record in records)
    return tuple({item.key: item for item in items}.values())


def phases_of_run(path: Path) -> Iterator[StoredEvaluation]:
    """Yield the evaluations before and after RL of a training run. Raises UserError if one is missing."""
    model, origin = saved_config(path).model.path, origin_of(path)
    for phase in ("eval_before", "eval_after"):
        items = evaluation_in(path, phase).items
        if not items:
            raise UserError(
                f"the run in '{path}' has no {phase}; `agentflow resume {shlex.quote(str(path))}` continues it"
            )
        # Both phases share code, configuration and base model.
        policy: dict[str, object] = {"backend": "vllm", "model": model, "adapter": phase}
        identity = Identity(policy=policy, fixed={}, num_results=len(items), provenance=origin)
        yield StoredEvaluation(path=path, identity=identity, items=items)


def evaluation_in(folder: Path, phase: str) -> Evaluation:
    """Read a phase of a training run."""
    logged = (trajectory for trajectory in read_trajectories(folder / TRAJECTORIES) if trajectory.phase == phase)
    return Evaluation(items=items_of(map(flat_record, logged)))


def why_unscored(items: Iterable[Item]) -> str:
    """Describe why items are unscored. Empty if all are scored."""
    if not (unscored := [item for item in items if item.unscored]):
        return ""
    broken = sum(item.broken for item in unscored)
    return (
        f"{broken} failed at every attempt by engine or tool and {len(unscored) - broken} got no score from a custom "
        f"scorer, first {unscored[0].key}"
    )


def means_by_item(items: Iterable[Item], *, with_judge: bool = False) -> dict[Place, float]:
    """Return for each item the share of its scored seeds that solved it, `with_judge` also by the judge's verdict."""
    solved = defaultdict[Place, list[bool]](list)
    for item in items:
        if not item.unscored:
            solved[item.place].append(item.solved or (with_judge and item.judged is True))
    return {place: mean(results) for place, results in solved.items()}
