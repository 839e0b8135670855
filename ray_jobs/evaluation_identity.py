"""The identity of an evaluation: the policy, and everything that must be equal to compare two policies.

Settings stand for themselves, and files by their digests. The package version stands for the code of this package.
"""

import asyncio
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NotRequired, TypedDict

from configs.plugins import load_own
from configs.rollout import CommandAgentConfig, FunctionAgentConfig
from configs.run import RunConfig
from envs.types import Task
from rollout.agent.program import Program
from rollout.engines.served import OllamaEngine

_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


class Policy(TypedDict):
    """The policy of an evaluation. The phases of a run have the first three fields."""

    backend: str
    model: str
    adapter: str | None
    model_digest: NotRequired[str | None]
    """None if a server does not report it."""
    adapter_digest: NotRequired[str | None]
    policy_version: NotRequired[int | None]
    lora_alpha: NotRequired[float]
    """The scale of the adapter."""


class Items(TypedDict):
    """The number of items of a benchmark, and a digest of their questions, references and scorers."""

    count: int
    digest: str


class Identity(TypedDict):
    """JSON values. All but `policy` must be equal on both sides of a comparison."""

    policy: Policy
    version: str
    seeds: int
    sampling: object
    quantisation: str | None
    """Number format of the weights, None if a server does not report it."""
    adapter_mode: str | None
    agent: object
    """The planner with its prompt, verifier and generator, or a custom agent."""
    tools: object
    memory: object
    judge: object
    code: Mapping[str, str | None]
    """Digests of custom source files and of data files that the settings name."""
    items: Mapping[str, Items]


FIXED = tuple(name for name in Identity.__annotations__ if name != "policy")


def identity_of(
    config: RunConfig, *, adapter: Path | None, model_path: Path | None, tasks: Sequence[Task], num_seeds: int
) -> Identity:
    """Return the identity of an evaluation. `model_path` is None if a server holds the model.

    Raises BackendError if the server does not answer, or UserError for a corrupt adapter.
    """
    backend = config.backend
    if model_path is not None:
        policy = _local_policy(config, adapter, model_path)
        quantisation: str | None = config.rollout.engine.precision
    else:
        assert backend.type != "vllm"
        installed = None
        if backend.type == "ollama":
            engine = OllamaEngine(backend, num_ctx=config.rollout.engine.max_model_len, seed=config.seed)
            installed = asyncio.run(engine.installed())
        digest = installed.digest if installed else None
        policy = {"backend": backend.type, "model": backend.model, "model_digest": digest, "adapter": None}
        quantisation = installed.details.quantization_level if installed and installed.details else None
    settings = _settings(config, tasks, seeds=num_seeds, temperature=config.evaluation.temperature)
    return _as_json(settings | {"policy": policy, "quantisation": quantisation, "code": _custom_code(config, tasks)})


def identity_of_phase(config: RunConfig, phase: str, tasks: Sequence[Task]) -> Identity:
    """Return the identity of an evaluation within a training run. Its phases share code and base model."""
    policy = {"backend": "vllm", "model": config.model.path, "adapter": phase}
    settings = _settings(config, tasks, seeds=1, temperature=0.0)
    return _as_json(settings | {"policy": policy, "quantisation": config.rollout.engine.precision, "code": {}})


def differences(one: Identity, other: Identity) -> list[str]:
    """Return the names of the fixed parts in which two identities differ."""
    return [name for name in FIXED if one.get(name) != other.get(name)]


def unproven(identity: Identity) -> list[str]:
    """Return the names of the facts that a server does not report."""
    facts = {"quantisation": identity["quantisation"], "model digest": identity["policy"].get("model_digest", "")}
    return [name for name, value in facts.items() if value is None]


def digest_of(value: object) -> str:
    """Return the SHA-256 digest of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def fact_rows(title_of: Callable[[str], str], *identities: Identity) -> Iterator[tuple[str, ...]]:
    """Yield table rows with a name and a column for each identity. Digests and large settings are shortened."""
    policies: list[Mapping[str, object]] = [identity["policy"] for identity in identities]
    for key in dict.fromkeys(key for policy in policies for key in policy):
        yield key.replace("_", " "), *(_short(policy.get(key)) for policy in policies)
    for name in FIXED:
        if name not in ("items", "agent", "tools", "seeds"):
            yield name.replace("_", " "), *(_short(identity.get(name)) for identity in identities)
    for name in ("agent", "tools"):
        yield f"digest of the {name} settings", *(digest_of(identity.get(name))[:12] for identity in identities)
    for name in dict.fromkeys(name for identity in identities for name in identity["items"]):
        yield f"items of {title_of(name)}", *(_short(identity["items"].get(name)) for identity in identities)


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        parts = {name: part for name, part in value.items() if part is not None}
        return ", ".join(f"{name.replace('_', ' ')} {_short(part)}" for name, part in parts.items()) or "none"
    return "none" if value is None else re.sub(r"\b[0-9a-f]{40,64}\b", lambda match: match[0][:12], str(value))


def _settings(config: RunConfig, tasks: Sequence[Task], *, seeds: int, temperature: float) -> dict[str, object]:
    rollout, memory, judge = config.rollout, config.planner.memory, config.evaluation.judge
    hints = memory.type != "none" and memory.in_evaluation
    items: dict[str, list[object]] = {}
    for task in tasks:
        metadata = dict(task.metadata) if task.scorer and ":" in task.scorer else {}
        items.setdefault(task.dataset, []).append([task.id, task.question, task.answer, task.scorer, metadata])
    return {
        "version": version("agentflow-ray"),
        "seeds": seeds,
        "sampling": {
            "temperature": temperature,
            "max_turn_tokens": rollout.max_turn_tokens,
            "max_model_len": rollout.engine.max_model_len,
            "episode_timeout_s": rollout.episode_timeout_s,
        },
        "adapter_mode": rollout.engine.adapter_mode if config.backend.type == "vllm" else None,
        "agent": config.agent.model_dump(mode="json", exclude={"memory"}),
        # The choice of tasks does not change a tool.
        "tools": config.envs.model_dump(mode="json", exclude={"mix", "choice", "datasets", "data_path"}),
        "memory": memory.model_dump(mode="json") if hints else None,
        "judge": judge and {"model": judge.model, "temperature": judge.temperature, "votes": judge.num_votes},
        "items": {
            name: {"count": len(rows), "digest": digest_of(sorted(rows, key=digest_of))}
            for name, rows in sorted(items.items())
        },
    }


def _custom_code(config: RunConfig, tasks: Sequence[Task]) -> dict[str, str | None]:
    envs = config.envs
    tools = {name: tool for name, tool in envs.tools.items() if name in envs.actions and not tool.is_mcp}
    sources = {tool.source: f"envs.tools.{name}" for name, tool in tools.items()}
    sources |= {task.scorer: "scorer" for task in tasks if task.scorer and ":" in task.scorer}
    files: list[Path] = [Path(envs.web.blocked_questions)] if envs.web.blocked_questions else []
    match config.agent:
        case FunctionAgentConfig(function=function):
            sources[function] = "agent.function"
        case CommandAgentConfig(command=command):
            files += Program(command, config.code_path).files
    digests: dict[str, str | None] = {str(path): _file_digest(path) for path in files}
    for source, key in sources.items():
        load_own(source, key=key)
        try:
            path = inspect.getsourcefile(sys.modules[source.partition(":")[0]])
        except TypeError:
            path = None
        digests[source] = _file_digest(Path(path)) if path else None
    return digests


def _local_policy(config: RunConfig, adapter: Path | None, model_path: Path) -> Policy:
    from learner.checkpoint import read_manifest

    paths = sorted({path for pattern in _MODEL_FILES for path in model_path.glob(pattern)})
    policy: Policy = {
        "backend": "vllm",
        "model": config.model.path,
        "model_digest": digest_of({path.name: _file_digest(path) for path in paths}),
        "adapter": str(adapter) if adapter else None,
    }
    if adapter:
        manifest = read_manifest(adapter)
        policy["adapter_digest"] = manifest["files"]["adapter.safetensors"]
        policy["policy_version"] = manifest["policy_version"]
        policy["lora_alpha"] = config.model.lora_alpha
    return policy


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_json(identity: Mapping[str, object]) -> Identity:
    # As it is read back from its file, where tuples are lists.
    read: Identity = json.loads(json.dumps(identity))
    return read
