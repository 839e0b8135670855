"""The documentation matches the program: commands parse, settings exist, links resolve, generated parts are fresh."""

import re
import subprocess
import sys

import pytest

from configs.base import types_of
from configs.loading import load_run_config
from configs.run import RunConfig
from docs import generated
from ray_jobs.cli import main, make_app
from tests.documented import NEEDS, PAGES, ROOT, RUNS, SHOWN, blocks_of, environment, fill, words_of

DOCS = ROOT / "docs"
QUICK = [block for block in SHOWN if block.marks.get("runs") == "quick"]
OPEN_TABLES = ("envs.mix", "envs.tools", "envs.datasets", "label.judge", "evaluation.judge")
"""Tables whose keys are names, or components with their own settings."""
APP = make_app()


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.name)
def test_commands_of_a_block_parse(block, tmp_path, monkeypatch):
    assert (block.marks.get("runs") in RUNS) != (block.marks.get("needs") in NEEDS), f"{block.name} has no test comment"
    fill(tmp_path, block.page)
    monkeypatch.chdir(tmp_path)
    # A checkpoint of a run that no test made.
    monkeypatch.setattr("ray_jobs.run.origin.checkpoint_at", lambda path: path)
    for command in block.commands:
        words = words_of(command)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        elif "agentflow" in words[:3]:
            arguments = words[words.index("agentflow") + 1 :]
            APP.parse_args(arguments)
            if arguments[0] == "init":
                (tmp_path / arguments[1]).mkdir()
        elif words[0] == "make":
            done = subprocess.run(["make", "-n", *words[1:]], env=environment(), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
            assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), command


@pytest.mark.parametrize("block", QUICK, ids=lambda block: block.name)
def test_quick_commands_succeed(block, tmp_path, monkeypatch):
    """In this process: a new one would import for seconds."""
    fill(tmp_path, block.page)
    monkeypatch.chdir(tmp_path)
    # A checkpoint of a run that no test made.
    monkeypatch.setattr("ray_jobs.run.origin.checkpoint_at", lambda path: path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for command in block.script.splitlines():
        program, *arguments = words_of(command)
        assert (program, main(arguments)) == ("agentflow", 0), command
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_generated_parts_are_fresh(page):
    """Run `make pages` after a change of settings, recipes, commands or metrics."""
    text = page.read_text(encoding="utf-8")
    assert generated.filled(text) == text


def anchors_of(page):
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors_of(file), target


def settings_of(model, path=""):
    """Return the dotted names of all settings."""
    names = set()
    for name, field in model.model_fields.items():
        key, kinds = f"{path}{name}", types_of(field.annotation)
        names.add(key)
        for kind in (kinds or {}).values():
            names |= settings_of(kind, f"{key}.")
        if not kinds and (inner := generated._model_of(field.annotation)):
            names |= settings_of(inner, f"{key}.")
    return names


def test_settings_named_in_the_text_exist():
    known, components = settings_of(RunConfig), "|".join(RunConfig.model_fields)
    named = re.compile(rf"`'?((?:{components})\.[a-z_]+(?:\.[a-z_]+)*)(?:[= ][^`\n]*)?`")
    for page in PAGES:
        for name in named.findall(page.read_text(encoding="utf-8")):
            if not name.startswith(OPEN_TABLES) and name.rpartition(".")[2] not in ("py", "json", "jsonl"):
                assert name in known, f"{page.name}: {name}"


def test_files_named_in_the_text_exist():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for path in re.findall(r"`((?:tests|benchmarks|examples|deploy|configs)/[\w/.-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
        for module in re.findall(r"`python -m (benchmarks\.\w+)", text):
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), f"{page.name}: {module}"


def test_recipes_shown_in_the_pages_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        fill(tmp_path, page)
        for block in blocks_of(page):
            if block.marks.get("file", "").endswith(".toml"):
                load_run_config(tmp_path / block.marks["file"])


def test_site_is_built_without_network_and_loads_nothing_from_other_hosts(tmp_path):
    dead = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    variables = {**environment(), **dead, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for page in DOCS.glob("*.md"):
        html = (tmp_path / f"{page.stem}.html").read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//", html), page.name
