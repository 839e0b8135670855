"""What the code knows best and the pages show: settings, recipes, agents, commands, metrics and the demo's numbers.

A page has a place for it, from `<!-- generated: settings -->`, `<!-- recipe: NAME -->` or `<!-- agent: NAME -->` to
`<!-- end -->`. What
`make pages` writes between the two is committed, so that the pages are whole where they are read as files; a test fails
while they say something else than the code.
"""

import inspect
import io
import json
import re
import sys
import tomllib
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

from configs.base import Config, types_of  # noqa: E402

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_PLACE = re.compile(r"(<!-- (generated|recipe|agent): ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_pages() -> None:
    for page in sorted(DOCS.glob("*.md")):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(markdown: str) -> str:
    """A page with what the code says now in each of its places."""
    return _PLACE.sub(lambda place: f"{place[1]}\n{_content(place[2], place[3]).strip()}\n\n{place[4]}", markdown)


def _content(kind: str, name: str) -> str:
    if kind in ("recipe", "agent"):
        return {"recipe": recipe, "agent": agent}[kind](name)
    lists = {"settings": settings, "recipes": recipes, "commands": commands, "metrics": metrics, "numbers": numbers}
    return lists[name]()


def settings() -> str:
    """One table for each component of a recipe."""
    from configs.run import RunConfig

    return "\n".join(_component(RunConfig, ()))


def _component(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    name = ".".join(path)
    yield f"\n## {f'`[{name}]`' if path else 'The run'}\n"
    if model.__doc__ and path:
        yield f"{inspect.cleandoc(model.__doc__)}\n"
    plain = {key: field for key, field in model.model_fields.items() if _model_of(field.annotation) is None}
    if plain:
        yield "| key | type | default | meaning |\n| --- | --- | --- | --- |"
        for key, field in plain.items():
            yield f"| `{key}` | {' | '.join(_row(field))} |"
    for key, field in model.model_fields.items():
        inner = _model_of(field.annotation)
        if types := types_of(field.annotation):
            yield from _typed(field, types, (*path, key))
        elif inner is not None:
            shown = f"{key}.NAME" if get_origin(field.annotation) is dict else key
            if field.description:
                yield f"\n`[{'.'.join((*path, shown))}]`: {' '.join(field.description.split())}"
            yield from _component(inner, (*path, shown))


def _typed(field: FieldInfo, types: dict[str, type[Config]], path: tuple[str, ...]) -> Iterator[str]:
    """A component whose `type` decides what else it has: what each type is, and one table of all settings."""
    name = ".".join(path)
    said = " ".join((field.description or "").split())
    yield f"\n## `[{name}]`\n\n{said} `type` is one of:\n".replace("\n\n `type`", "\n\n`type`")
    default = field.get_default(call_default_factory=True).type
    for kind, model in types.items():
        note = " (the default)" if kind == default else ""
        yield f"- `{kind}`{note}: {' '.join(inspect.cleandoc(model.__doc__ or '').split())}"
    settings: dict[tuple[str, ...], list[str]] = {}
    for kind, model in types.items():
        for key, inner in model.model_fields.items():
            if key != "type" and _model_of(inner.annotation) is None:
                settings.setdefault((key, *_row(inner)), []).append(kind)
    yield "\n| key | of type | is | default | meaning |\n| --- | --- | --- | --- | --- |"
    yield f"| `type` | all | {' or '.join(f'`{kind}`' for kind in types)} | `{json.dumps(default)}` | Which of these. |"
    for (key, shown, standard, meaning), kinds in settings.items():
        yield f"| `{key}` | {', '.join(f'`{kind}`' for kind in kinds)} | {shown} | {standard} | {meaning} |"
    for model in types.values():
        for key, inner in model.model_fields.items():
            if (found := _model_of(inner.annotation)) is not None:
                yield from _component(found, (*path, key))


def _row(field: FieldInfo) -> tuple[str, str, str]:
    said = " ".join((field.description or "").split())
    return _type(field), _default(field), said.replace("|", chr(92) + "|")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The component behind an annotation, also behind an optional one or a table of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_of(part))), None)


def _type(field: FieldInfo) -> str:
    bounds = [f"{sign} {value:,}" for name, sign in _BOUNDS.items() if (value := _bound(field, name)) is not None]
    return ", ".join([_shown_type(field.annotation), *bounds])


def _bound(field: FieldInfo, name: str) -> float | None:
    return next((getattr(part, name) for part in field.metadata if hasattr(part, name)), None)


def _shown_type(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        named = [_shown_type(part) for part in parts if part is not type(None)]
        return " or ".join(named) + (" or none" if type(None) in parts else "")
    if origin is Annotated:
        return _shown_type(parts[0])
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {_shown_type(parts[0])}"
    if origin is dict:
        return f"table of {_shown_type(parts[1])}"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}[annotation.__name__]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    shown = ", ".join(f"{key} = {part}" for key, part in value.items()) if isinstance(value, dict) else None
    return f"`{{ {shown} }}`" if shown else f"`{json.dumps(value, ensure_ascii=False)}`"


def recipes() -> str:
    """All recipes side by side."""
    from configs.loading import load_run_config

    lines = ["| recipe | model | steps | B, G | D | objective | credit |", "| --- " * 7 + "|"]
    for path in sorted(RECIPES.glob("*.toml")):
        run = load_run_config(path)
        lines.append(
            f"| [`{path.stem}`](#{path.stem}) | {run.model.path.rpartition('/')[2]} | {run.num_steps} | "
            f"{run.batch_groups}, {run.rollout.group_size} | {run.pipeline_depth} | `{run.learner.loss.type}` | "
            f"`{run.reward.credit.type}` |"
        )
    return "\n".join(lines)


def recipe(name: str) -> str:
    """The recipe's own file, folded."""
    text = (RECIPES / f"{name}.toml").read_text(encoding="utf-8")
    tomllib.loads(text)
    return _folded(f"configs/recipes/{name}.toml", "toml", text)


def agent(name: str) -> str:
    """An agent of another project, folded."""
    path = f"benchmarks/agents/{name}.py"
    return _folded(path, "python", (ROOT / path).read_text(encoding="utf-8"))


def commands() -> str:
    """What every command says of itself with `--help`."""
    from ray_jobs.cli import make_app

    app = make_app()
    app.help_formatter = PlainFormatter()
    lines = []
    for name in commands_of(app):
        said = io.StringIO()
        app.help_print(name.split(), console=Console(file=said, width=100))
        lines.append(_folded(f"agentflow {name}", "text", said.getvalue()))
    return "\n".join(lines)


def commands_of(app: App) -> Iterator[str]:
    """The names of all commands, also of those below another one, as they are typed."""
    for name in app:
        if not name.startswith("-"):
            yield name
            yield from (f"{name} {below}" for below in commands_of(app[name]))


def metrics() -> str:
    """Every metric, histogram and text of a run, from their tables."""
    return "\n".join(_metrics())


def _metrics() -> Iterator[str]:
    from ray_jobs.run.bottleneck import LIMITS
    from ray_jobs.run.metrics import GROUPS, LIVE, LOGGED
    from ray_jobs.run.trackers import HISTOGRAMS, TEXTS

    for group, title in GROUPS.items():
        shown = [metric for metric in LOGGED if metric.name.startswith(f"{group}/")]
        yield f"## {title}"
        yield from _table(("metric", "unit", "what it says"), [(f"`{one.name}`", one.unit, one.says) for one in shown])
    yield "## What are the workers doing?\n"
    yield "Gauges only, which each worker sets as it happens, with the tags `run` and `worker`."
    yield from _table(("metric", "unit", "what it says"), [(f"`{one.name}`", one.unit, one.says) for one in LIVE])
    yield "## The numbers of util/bottleneck"
    limits = [(str(index), limit.replace("_", " ")) for index, limit in enumerate(LIMITS)]
    yield from _table(("number", "what limits"), limits)
    for title, where, rows in (
        ("Histograms", "In TensorBoard, over the trajectories that the step trained.", HISTOGRAMS),
        ("Texts", "In TensorBoard.", TEXTS),
    ):
        yield f"## {title}\n\n{where}"
        yield from _table(("name", "what it counts or shows"), [(f"`{name}`", says) for name, says in rows.items()])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"\n| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def numbers() -> str:
    """The table of the demo's results, as the README has it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [table] = re.findall(r"<!-- the demo's numbers -->\n(.*?)<!-- end -->", readme, re.DOTALL)
    return table.strip()


def _folded(title: str, language: str, text: str) -> str:
    """Closed until it is clicked, on the site and where the file itself is shown."""
    body = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return (
        f'<details markdown="1"><summary><code>{title}</code></summary>\n\n```{language}\n{body}\n```\n\n</details>\n'
    )


if __name__ == "__main__":
    write_pages()
