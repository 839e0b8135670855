"""Replaces links out of docs/ by the name of the file: the site is read without the code."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\((\.\./[^)#\s]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _LINK.sub(lambda link: _named(link[1], posixpath.normpath(link[2]).removeprefix("../")), markdown)


def _named(text: str, path: str) -> str:
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
