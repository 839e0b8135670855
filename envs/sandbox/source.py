"""From what a model wrote to code that Python can run, with errors that a model can act on."""

import ast
import textwrap
from types import CodeType

from envs.sandbox.settings import ALLOWED_IMPORTS

_FILE_NAME = "<code>"
_FENCE = "```"


class ForbiddenImportError(Exception):
    """Says which imports there are. Code that hides an import from this check meets the kernel instead."""


def compile_source(source: str, *, check_imports: bool) -> tuple[CodeType, CodeType | None]:
    """The statements, and the bare last expression whose value is shown."""
    tree = _parse(_without_fence(source))
    if check_imports:
        for name in _imported_names(tree):
            if name not in ALLOWED_IMPORTS:
                raise ForbiddenImportError(
                    f"import of '{name}' is not allowed; available: {', '.join(sorted(ALLOWED_IMPORTS))}"
                )
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
        last = compile(expression, _FILE_NAME, "eval")
    return compile(tree, _FILE_NAME, "exec"), last


def _without_fence(source: str) -> str:
    stripped = source.strip()
    if stripped.startswith(_FENCE) and stripped.endswith(_FENCE) and "\n" in stripped:
        return stripped.split("\n", 1)[1].removesuffix(_FENCE)
    return source


def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source, _FILE_NAME)
    except IndentationError:
        return ast.parse(textwrap.dedent(source).strip(), _FILE_NAME)


def _imported_names(tree: ast.Module) -> list[str]:
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or ".")
    return [name.partition(".")[0] or "." for name in names]
