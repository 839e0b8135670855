"""The house rules: imports go one way, heavy libraries stay in their rooms, files and folders are small."""

import ast
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("configs", "envs", "rollout", "learner", "reward", "actors", "ray_jobs")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
HTTP = ("httpx", "httpx2", "httpcore", "openai", "requests", "aiohttp", "urllib3", "urllib.request", "http.client")
PLACES = {
    ("ray",): "(actors|ray_jobs)/",
    ("vllm",): r"rollout/engines/(vllm|vllm_parts|adapters)\.py",
    # The tools have one client beside those of hostile pages and of MCP. Ray's own errors are those of `requests`.
    HTTP: r"envs/tools/(http|web_fetch|mcp|guard)\.py|reward/judge_client\.py|rollout/engines/served\.py"
    r"|rollout/agent/(custom|verifiers)\.py|ray_jobs/submit\.py",
    # No part of the agent or the world.
    ("torch",): r"(learner|reward|actors|ray_jobs)/"
    r"|rollout/engines/(vllm|vllm_parts|adapters|base_weights|read_back)\.py",
}
MAX_LINES, MAX_FILES = 500, 16
SMALL_LINES, MAX_SMALL = 60, 30
MAX_ANY = 6 / 1000
"""Of each line of source."""


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def modules_of(path):
    """Every module that is named, and the packages around it."""
    return {package for name in imports_of(path) for package in accumulate(name.split("."), "{}.{}".format)}


MODULES = {str(path.relative_to(ROOT)): modules_of(path) for path in FILES}


def places_of(*libraries):
    return {place for place, modules in MODULES.items() if modules & set(libraries)}


def test_a_room_imports_only_itself_and_the_rooms_before_it():
    for place, modules in MODULES.items():
        later = ROOMS[ROOMS.index(place.split("/")[0]) + 1 :]
        assert modules.isdisjoint(later), place


@pytest.mark.parametrize("libraries", PLACES)
def test_libraries_stay_in_their_rooms(libraries):
    assert [place for place in places_of(*libraries) if not re.match(PLACES[libraries], place)] == []


def test_no_file_has_outgrown_its_noun():
    assert [str(path) for path in FILES if path.read_text().count("\n") > MAX_LINES] == []


def test_a_folder_shows_its_nouns_at_a_glance():
    nouns = Counter(path.parent for path in FILES if path.read_text().strip())
    assert [folder for folder, count in nouns.items() if count > MAX_FILES] == []


def test_few_files_are_too_small_for_a_noun():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
    small = [place for place, text in texts.items() if text.strip() and text.count("\n") <= SMALL_LINES]
    assert len(small) <= MAX_SMALL, small


def test_what_passes_a_seam_has_a_type():
    """`Any` is for JSON of others and for what a library makes at run time."""
    lines = [line for path in FILES for line in path.read_text().splitlines()]
    untyped = sum(len(re.findall(r"\bAny\b", line)) for line in lines if not re.match(r"\s*(from|import)\s", line))
    assert untyped <= MAX_ANY * len(lines)
