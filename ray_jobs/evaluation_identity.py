"""What an evaluation is of: the policy, and all that must be the same for two policies to be compared.

Everything is named by a digest of the thing itself, so that two evaluations can prove that they had the same frozen
modules, the same items and the same settings.
"""

import ast
import asyncio
import hashlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NotRequired, TypedDict

from configs.backend import OllamaConfig, VllmConfig
from configs.plugins import load_own
from configs.rollout import (
    CommandAgentConfig,
    FrozenModelConfig,
    FunctionAgentConfig,
    ModuleConfig,
    NoMemoryConfig,
    PlannerAgentConfig,
)
from configs.run import RunConfig
from envs.types import Task
from reward import answer_judge, scorers
from reward.scorers import game24, math, text
from rollout import chat
from rollout.agent import agent, planner
from rollout.agent.program import Program
from rollout.engines.served import OllamaEngine

FIXED = (
    *("verifier", "generator", "quantisation", "sampling", "agent", "prompt", "tools", "memory"),
    *("scorer", "judge", "items"),
)
"""What must be equal on both sides of a comparison; the policy is what may differ."""


class Policy(TypedDict):
    """The phases of a run name theirs by the first three. Only one with an adapter has a scale, and evaluations of
    earlier releases do not name it."""

    backend: str
    model: str
    adapter: str | None
    model_digest: NotRequired[str | None]
    adapter_digest: NotRequired[str | None]
    policy_version: NotRequired[int | None]
    lora_alpha: NotRequired[float]


class Weights(TypedDict):
    """`weights` is None where a server does not tell."""

    weights: str | None
    told_by: str
    adapter_mode: str | None


class Sampling(TypedDict):
    temperature: float
    seeds: int
    max_steps: int
    max_turn_tokens: int
    max_model_len: int
    format_retries: int
    episode_timeout_s: float
    max_attempts: int


class Items(TypedDict):
    count: int
    digest: str


class Identity(TypedDict):
    """What nobody reads is an object: it is only compared. Evaluations of earlier releases name no scorer."""

    policy: Policy
    verifier: object
    generator: object
    quantisation: Weights
    sampling: Sampling
    agent: str
    prompt: object
    tools: object
    memory: object
    scorer: NotRequired[str]
    judge: object
    items: Mapping[str, Items]


_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def identity_of(
    config: RunConfig, *, adapter: Path | None, model_path: Path | None, tasks: Sequence[Task], num_seeds: int
) -> Identity:
    """JSON values only. `model_path` is the folder of the base model, None where a server has it.

    Raises BackendError where a server cannot be asked, CheckpointError for an adapter that cannot be trusted.
    """
    policy, weights = _served(config) if model_path is None else _own(config, adapter, model_path)
    base = policy["model_digest"]
    identity: Identity = {
        "policy": policy,
        "verifier": _module(config.planner.verifier, base),
        "generator": _module(config.planner.generator, base),
        "quantisation": weights,
        "sampling": _sampling(config, num_seeds, config.evaluation.temperature),
        "agent": _agent(config),
        "prompt": config.planner.prompt.model_dump(mode="json"),
        "tools": _tools(config) | _own_tools(config),
        "memory": _memory(config),
        "scorer": _scorer(tasks),
        "judge": _judge(config),
        "items": _items(tasks),
    }
    return _read_back(identity)


def identity_of_phase(config: RunConfig, phase: str, *, commit: str, tasks: Sequence[Task]) -> Identity:
    """Of an evaluation inside of a training run: whatever is no policy is the run's own, and so are code and base. All
    its phases have the one base model that the run loaded, so none is named by a digest."""
    code = f"commit {commit}"
    verifier, generator = (
        {"kind": module.type, "max_tokens": getattr(module, "max_tokens", 64), "code": code}
        for module in (config.planner.verifier, config.planner.generator)
    )
    identity: Identity = {
        "policy": {"backend": "vllm", "model": config.model.path, "adapter": phase},
        "verifier": verifier,
        "generator": generator,
        "quantisation": _own_weights(config),
        "sampling": _sampling(config, 1, 0.0),
        "agent": code,
        "prompt": config.planner.prompt.model_dump(mode="json"),
        "tools": _tools(config),
        "memory": _memory(config),
        "scorer": code,
        "judge": None,
        "items": _items(tasks),
    }
    return _read_back(identity)


def _read_back(identity: Identity) -> Identity:
    """As it will be read from its file: tuples are lists there."""
    found: Identity = json.loads(json.dumps(identity))
    return found


def digest_of(value: object) -> str:
    """The same for equal JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def differences(one: Identity, other: Identity) -> list[str]:
    """The parts of FIXED in which two identities differ."""
    return [name for name in FIXED if one.get(name) != other.get(name)]


def unproven(identity: Identity) -> list[str]:
    """What a server does not tell, and what therefore rests on its operator's word."""
    policy = identity["policy"]
    if policy["backend"] == "vllm":
        return []
    said = {"quantisation": identity["quantisation"]["weights"], "digest of the model": policy["model_digest"]}
    return [name for name, value in said.items() if value is None]


def _own(config: RunConfig, adapter: Path | None, model_path: Path) -> tuple[Policy, Weights]:
    from learner.checkpoint import read_manifest

    manifest = read_manifest(adapter) if adapter else None
    policy: Policy = {
        "backend": "vllm",
        "model": config.model.path,
        "model_digest": _files_digest(model_path),
        "adapter": str(adapter) if adapter else None,
        "adapter_digest": manifest["files"]["adapter.safetensors"] if manifest else None,
        "policy_version": manifest["policy_version"] if manifest else None,
    }
    if adapter:
        policy["lora_alpha"] = config.model.lora_alpha
    return policy, _own_weights(config)


def _own_weights(config: RunConfig) -> Weights:
    engine = config.rollout.engine
    return {"weights": engine.precision, "told_by": "the engine's setting", "adapter_mode": engine.adapter_mode}


def _served(config: RunConfig) -> tuple[Policy, Weights]:
    backend = config.backend
    installed = None
    assert not isinstance(backend, VllmConfig)
    if isinstance(backend, OllamaConfig):
        engine = OllamaEngine(backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed)
        installed = asyncio.run(engine.installed())
    policy: Policy = {
        "backend": backend.type,
        "model": backend.model,
        "model_digest": installed.digest if installed else None,
        "adapter": None,
        "adapter_digest": None,
        "policy_version": None,
    }
    level = installed.details.quantization_level if installed and installed.details else None
    return policy, {"weights": level, "told_by": "the server", "adapter_mode": None}


def _module(config: ModuleConfig, base_digest: str | None) -> object:
    """A rule is its code; a model is its code with its prompt, and the base weights that never change."""
    asks = isinstance(config, FrozenModelConfig)
    return {
        "kind": config.type,
        "max_tokens": config.max_tokens if isinstance(config, FrozenModelConfig) else None,
        "code": _code_digest(agent),
        "weights": base_digest if asks else None,
    }


def _sampling(config: RunConfig, num_seeds: int, temperature: float) -> Sampling:
    rollout, settings = config.rollout, config.planner
    return {
        "temperature": temperature,
        "seeds": num_seeds,
        "max_steps": settings.max_steps,
        "max_turn_tokens": rollout.max_turn_tokens,
        "max_model_len": rollout.engine.max_model_len,
        "format_retries": settings.format_retries,
        "episode_timeout_s": rollout.episode_timeout_s,
        "max_attempts": config.evaluation.max_attempts,
    }


def _tools(config: RunConfig) -> dict[str, object]:
    """Without the tasks and what chooses between them; and whether results are recorded or replayed does not change
    what a tool is."""
    return config.envs.model_dump(mode="json", exclude={"mix", "choice", "datasets", "data_path", "recording"})


def _own_tools(config: RunConfig) -> dict[str, object]:
    """The code of one's own behind the tools, by their names, and the questions that they keep back. Nothing where
    there are none."""
    own = {name: config.envs.tools[name] for name in config.envs.actions if name in config.envs.tools}
    sources = {name: _source_digest(tool.source, f"envs.tools.{name}") for name, tool in own.items() if not tool.is_mcp}
    blocked = config.envs.web.blocked_questions
    return ({"code": sources} if sources else {}) | ({"blocked": _file_digest(Path(blocked))} if blocked else {})


def _agent(config: RunConfig) -> str:
    """The planner is its code; an agent of one's own its module, or its command with the files that it names, and its
    settings."""
    settings = config.agent.model_dump(mode="json")
    match config.agent:
        case PlannerAgentConfig():
            return _code_digest(agent, chat, planner)
        case FunctionAgentConfig(function=function):
            return digest_of([settings, _source_digest(function, "agent.function")])
        case CommandAgentConfig(command=command):
            return digest_of([settings, *map(_file_digest, Program(command, config.code_path).files)])


def _scorer(tasks: Sequence[Task]) -> str:
    """Our comparisons are their code, besides the modules of one's own that score some of the tasks."""
    own = sorted({task.scorer for task in tasks if task.scorer and ":" in task.scorer})
    return digest_of([_code_digest(scorers, game24, math, text), *(_source_digest(name, "scorer") for name in own)])


def _memory(config: RunConfig) -> object:
    """None where no hints of earlier tasks are shown."""
    memory = config.planner.memory
    return None if isinstance(memory, NoMemoryConfig) or not memory.in_evaluation else memory.model_dump(mode="json")


def _judge(config: RunConfig) -> object:
    """Its settings; the code is what it is asked, and about which items."""
    judge = config.evaluation.judge
    if judge is None:
        return None
    settings = {"model": judge.model, "temperature": judge.temperature, "votes": judge.num_votes}
    return {**settings, "code": _code_digest(answer_judge)}


def _items(tasks: Sequence[Task]) -> dict[str, Items]:
    rows: dict[str, list[list[str]]] = {}
    for task in tasks:
        rows.setdefault(task.dataset, []).append([task.id, task.question, task.answer, *_scored_by(task)])
    return {name: {"count": len(rows[name]), "digest": digest_of(sorted(rows[name]))} for name in sorted(rows)}


def _scored_by(task: Task) -> list[str]:
    """The name of a scorer that is not the data set's, and what one of one's own may read besides the answer."""
    if task.scorer is None:
        return []
    reads = ":" in task.scorer and task.metadata
    return [task.scorer, digest_of(dict(task.metadata))] if reads else [task.scorer]


def _code_digest(*parts: ModuleType) -> str:
    return digest_of([inspect.getsource(part) for part in parts])


def _source_digest(source: str, key: str) -> str | None:
    """Of the module of one's own that a setting names, but for its comments, and without what it imports; None where
    there is no text of it. Raises OwnCodeError."""
    load_own(source, key=key)
    try:
        code = inspect.getsource(sys.modules[source.partition(":")[0]])
    except (OSError, TypeError):
        return None
    return digest_of(ast.unparse(ast.parse(code)))


def _files_digest(folder: Path) -> str:
    """Over the contents of a model's files, whatever the folder is called."""
    paths = sorted({path for pattern in _MODEL_FILES for path in folder.glob(pattern)})
    return digest_of({path.name: _file_digest(path) for path in paths})


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
