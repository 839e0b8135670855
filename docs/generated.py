"""Parts of the documentation that are generated from the code: settings, recipes, commands and metrics.

A page has a place for each part, from `<!-- generated: NAME -->` to `<!-- end -->`. `make pages` fills the places, and
the result is committed so that the pages are complete as files. A test fails if a page is not up to date.
"""

import inspect
import io
import json
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from cyclopts import App
from cyclopts.help.formatters import PlainFormatter
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "configs" / "recipes"
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

from configs.base import MAY_CHANGE, types_of  # noqa: E402
from configs.reward import JudgeConfig  # noqa: E402

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_PLACE = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_pages() -> None:
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(markdown: str) -> str:
    """Return the page with every place filled from the code."""
    parts = {"settings": settings, "recipes": recipes, "commands": commands, "metrics": metrics}
    return _PLACE.sub(lambda place: f"{place[1]}\n{chr(10).join(parts[place[2]]()).strip()}\n\n{place[3]}", markdown)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"\n| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def settings() -> Iterator[str]:
    """Yield one table for the run and one for each table of a recipe."""
    from configs.run import RunConfig

    nested = {name: field for name, field in RunConfig.model_fields.items() if _is_table(field.annotation)}
    plain = {name: field for name, field in RunConfig.model_fields.items() if name not in nested}
    columns = ("key", "type", "default", "meaning")
    yield "## The run"
    yield from _table(columns, [_row(name, field) for name, field in plain.items()])
    for name, field in nested.items():
        yield f"\n## `[{name}]`\n\n{_meaning(field)}".rstrip()
        yield from _table(columns, _rows(field, ""))


def _is_table(annotation: Any) -> bool:
    return bool(types_of(annotation)) or _model_of(annotation) is not None


def _rows(field: FieldInfo, path: str) -> Iterator[tuple[str, ...]]:
    """Yield the settings of a component; of components with a `type`, those of every type."""
    prefix = f"{path}." if path else ""
    if kinds := types_of(field.annotation):
        default = field.get_default(call_default_factory=True).type
        texts = [_text(field.description)] if path else []
        for model in dict.fromkeys(kinds.values()):
            names = ", ".join(f"`{name}`" for name, other in kinds.items() if other is model)
            texts.append(f"{names}: {_text(inspect.cleandoc(model.__doc__ or ''))}")
        yield f"`{prefix}type`", "name", f"`{json.dumps(default)}`", "<br>".join(texts)
        members: dict[tuple[str, ...], list[str]] = {}
        for kind, model in kinds.items():
            for name, inner in model.model_fields.items():
                if name != "type":
                    for row in _fields(name, inner, prefix):
                        members.setdefault(row, []).append(kind)
        for (key, *cells, meaning), names in members.items():
            only = "" if len(names) == len(kinds) else f"({', '.join(f'`{name}`' for name in names)}) "
            yield key, *cells, f"{only}{meaning}"
    elif (model := _model_of(field.annotation)) is not None:
        for name, inner in model.model_fields.items():
            yield from _fields(name, inner, prefix)


def _fields(name: str, field: FieldInfo, prefix: str) -> Iterator[tuple[str, ...]]:
    if field.annotation == (JudgeConfig | None):
        yield f"`{prefix}{name}`", "table", "none", f"{_meaning(field)} Its keys are those of `label.judge`."
    elif _is_table(field.annotation):
        yield from _rows(field, f"{prefix}{name}{'.NAME' if get_origin(field.annotation) is dict else ''}")
    else:
        yield _row(f"{prefix}{name}", field)


def _row(name: str, field: FieldInfo) -> tuple[str, ...]:
    return f"`{name}`", _type(field), _default(field), _meaning(field)


def _meaning(field: FieldInfo) -> str:
    return _text(f"{field.description or ''}{' (resume)' * (MAY_CHANGE in field.metadata)}")


def _text(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the component behind an annotation, an optional one or a table of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_of(part))), None)


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(part, name):,}"
        for name, sign in _BOUNDS.items()
        for part in field.metadata
        if hasattr(part, name)
    ]
    return ", ".join([_shown_type(field.annotation), *bounds])


def _shown_type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        shown = [_shown_type(part) for part in parts if part is not type(None)]
        return " or ".join(shown) + (" or none" if type(None) in parts else "")
    if origin is Annotated:
        return _shown_type(parts[0])
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {_shown_type(parts[0])}"
    if origin is dict:
        return f"table of {_shown_type(parts[1])}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}[annotation.__name__]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory_takes_validated_data:
        return "by device"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, dict) and value:
        return f"`{{ {', '.join(f'{key} = {part}' for key, part in value.items())} }}`"
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def recipes() -> Iterator[str]:
    """Yield all recipes side by side."""
    from configs.loading import load_run_config

    rows = []
    for path in sorted(RECIPES.glob("*.toml")):
        run = load_run_config(path)
        facts = run.model.path.rpartition("/")[2], str(run.num_steps), f"{run.batch_groups}, {run.rollout.group_size}"
        credit = f"`{run.reward.credit.type}`"
        link = f"[`{path.stem}`](../configs/recipes/{path.name})"
        rows.append((link, *facts, str(run.pipeline_depth), f"`{run.learner.loss.type}`", credit))
    yield from _table(("recipe", "model", "steps", "B, G", "D", "loss", "credit"), rows)


def commands() -> Iterator[str]:
    """Yield usage, description and options of every command."""
    from ray_jobs.cli import make_app

    app, said = make_app(), set[str]()
    app.help_formatter = PlainFormatter()
    for name in commands_of(app):
        output = io.StringIO()
        app.help_print(name.split(), console=Console(file=output, width=10_000))
        usage, *lines = (line.rstrip() for line in output.getvalue().strip().splitlines())
        yield f"\n### {name}\n\n`{' '.join(usage.removeprefix('Usage: ').split())}`\n"
        options = [line for line in lines if line.startswith("  ")]
        text = [line for line in lines if line and not line.startswith("  ") and not line.endswith(":")]
        yield " ".join(text) + "\n"
        for line in options:
            option, _, meaning = line.strip().partition(": ")
            shown = "as above" if line in said else meaning
            said.add(line)
            yield f"- `{option}`: {shown}" if shown else f"- `{option}`"


def commands_of(app: App) -> Iterator[str]:
    """Yield the names of all commands, including subcommands, as they are typed."""
    for name in app:
        if not name.startswith("-"):
            yield name
            yield from (f"{name} {below}" for below in commands_of(app[name]))


def metrics() -> Iterator[str]:
    """Yield tables of every metric of a run."""
    from envs.datasets.families import FAMILIES
    from ray_jobs.run.metrics import GROUPS, LIMITS, LIVE, LOGGED

    family = re.compile(rf"/({'|'.join(FAMILIES)})$")
    columns = ("metric", "unit", "meaning")
    for group, title in GROUPS.items():
        shown = [metric for metric in LOGGED if metric.name.startswith(f"{group}/")]
        rows = [(f"`{family.sub('/DATASET', one.name)}`", one.unit, one.says) for one in shown]
        yield f"\n## {title}"
        yield from _table(columns, dict.fromkeys(rows))
    yield "\n## What are the workers doing?\n\nGauges of each worker, with the tags `run` and `worker`."
    yield from _table(columns, [(f"`{one.name}`", one.unit, one.says) for one in LIVE])
    limits = ", ".join(f"{index} {limit.replace('_', ' ')}" for index, limit in enumerate(LIMITS))
    yield f"\nValues of `util/bottleneck`: {limits}."


if __name__ == "__main__":
    write_pages()
