"""Settings as earlier releases wrote them: recipes and run folders of theirs mean the same under today's keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.base import Config, types_of

Table = dict[str, Any]

MOVED = {
    "learner.objective": "learner.loss.type",
    "learner.kl_weight": "learner.loss.kl_weight",
    "learner.clip_low": "learner.loss.clip_low",
    "learner.clip_high": "learner.loss.clip_high",
    "learner.overlong_cache_tokens": "learner.overlong.cache_tokens",
    "learner.correction.kind": "learner.correction.type",
    "reward.prm_path": "reward.credit.prm_path",
    "reward.prm_weight": "reward.credit.prm_weight",
    "reward.alarms": "reward.credit.alarms",
    "label.labeller": "label.type",
    "rollout.verifier.kind": "rollout.verifier.type",
    "rollout.generator.kind": "rollout.generator.type",
    "backend.kind": "backend.type",
}
"""Keys of before, and where their value is now."""


def as_today(values: Mapping[str, object], model: type[Config]) -> Table:
    """The same settings under today's keys. A run folder of before holds every key: there, what has no effect on its
    type is left out. Raises ValueError for a key of before beside the one that replaced it."""
    whole = "objective" in _at(values, "learner") and "labeller" in _at(values, "label")
    today: Table = _copied(values)
    for old, new in MOVED.items():
        path, _, key = old.rpartition(".")
        if key in _at(today, path):
            _put(today, old, new, _at(today, path).pop(key))
    _one_clip(_at(today, "learner.loss"))
    _memory(today, whole)
    if whole:
        # Votes of an answer's judge are counted, not measured: the setting never had an effect there.
        _at(today, "evaluation.judge").pop("max_spread", None)
        for table, known in _typed_tables(today, model):
            for key in [key for key in table if key not in known or table[key] is None]:
                del table[key]
    return today


def _copied(value: Any) -> Any:
    return {key: _copied(part) for key, part in value.items()} if isinstance(value, Mapping) else value


def _at(values: Mapping[str, object], path: str) -> Table:
    """The table at a dotted path; an empty one where there is none."""
    table: object = values
    for key in path.split("."):
        table = table.get(key) if isinstance(table, dict) else None
    return table if isinstance(table, dict) else {}


def _put(values: Table, old: str, new: str, value: object) -> None:
    path, _, key = new.rpartition(".")
    table = values
    for part in path.split("."):
        inner = table.setdefault(part, {})
        if isinstance(inner, str):
            inner = table[part] = {"type": inner}
        table = inner
    if key in table:
        raise ValueError(f"{old} is now {new}, and both are set; leave {old} out")
    table[key] = value


def _one_clip(loss: Table) -> None:
    """Both sides clipped alike in these two, at what was `clip_low`."""
    if loss.get("type") in ("grpo", "flow_grpo") and "clip_low" in loss:
        loss["clip"] = loss.pop("clip_low")


def _memory(values: Table, whole: bool) -> None:
    memory = _at(values, "memory")
    if not memory.keys() & {"enabled", "location"}:
        return
    enabled, location = memory.pop("enabled", False), memory.pop("location", ":memory:")
    if not enabled and not whole and location != ":memory:":
        raise ValueError("memory.location is now memory.type = 'folder' with memory.path, or 'server' with memory.url")
    if not enabled:
        memory["type"] = "none"
    elif location == ":memory:":
        memory["type"] = "in_process"
    elif str(location).startswith(("http://", "https://")):
        memory |= {"type": "server", "url": location}
    else:
        memory |= {"type": "folder", "path": location}


def _typed_tables(values: Table, model: type[Config]) -> Iterator[tuple[Table, set[str]]]:
    """Every table whose `type` decides what it may hold, with the keys that it may."""
    for name, field in model.model_fields.items():
        table, types = values.get(name), types_of(field.annotation)
        if isinstance(table, dict) and table.get("type") in types:
            yield table, set(types[table["type"]].model_fields)
        elif isinstance(table, dict) and isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from _typed_tables(table, field.annotation)
