"""The house rule: imports go one way, and heavy libraries stay in their rooms."""

import ast
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("configs", "envs", "rollout", "learner", "reward", "actors", "ray_jobs")
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
HTTP = {"httpx", "requests", "aiohttp", "urllib3", "tavily", "urllib.request", "http.client"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def tops_of(path):
    return {name.split(".")[0] for name in imports_of(path)}


def modules_of(path):
    """Every module that is named, and the packages around it."""
    return {package for name in imports_of(path) for package in accumulate(name.split("."), "{}.{}".format)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_itself_and_the_rooms_before_it(path):
    room = path.relative_to(ROOT).parts[0]
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    assert not tops_of(path) & later


def places_of(*libraries):
    return {str(path.relative_to(ROOT)) for path in FILES if modules_of(path) & set(libraries)}


def test_ray_is_imported_only_by_actors_and_jobs():
    assert {place.split("/")[0] for place in places_of("ray")} <= {"actors", "ray_jobs"}


def test_vllm_is_imported_by_one_file():
    assert places_of("vllm") == {"rollout/vllm_parts.py"}


def test_http_clients_are_imported_only_by_tools_and_the_clients_of_chat_models():
    chats = {"reward/openai_chat.py", "rollout/chat_http.py"}
    assert all(place.startswith("envs/tools/") or place in chats for place in places_of(*HTTP))


def test_torch_is_imported_by_no_part_of_the_agent_or_the_world():
    allowed = {"rollout/vllm_engine.py", "rollout/merging.py", "rollout/read_back.py"}
    inside = {place for place in places_of("torch") if place.split("/")[0] in ("configs", "envs", "rollout")}
    assert inside <= allowed


def test_no_file_has_outgrown_its_noun():
    assert [str(path) for path in FILES if path.read_text().count("\n") > 450] == []
