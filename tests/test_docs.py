"""What the documentation promises is what the program does: commands, settings, recipes, messages, links."""

import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser

import pytest
import torch

from configs.base import types_of
from configs.envs import EnvsConfig
from configs.loading import load_run_config
from configs.run import RunConfig
from docs import generated
from envs.datasets import families
from envs.datasets.own import OwnSources, own_tasks
from envs.tools.toolbox import Toolbox
from learner.losses import LossInputs, policy_loss
from ray_jobs.cli import make_app
from ray_jobs.commands.given import run_config
from ray_jobs.commands.training import init
from reward.scorers import score_answer
from tests.documented import NEEDS, PAGES, ROOT, RUNS, SHELLS, blocks, blocks_of, environment, files_of, fill, words_of

DOCS = ROOT / "docs"
SHOWN = [block for block in blocks() if block.shows_commands]
QUICK = [block for block in SHOWN if block.marks.get("runs") == "quick"]
OPEN_TABLES = ("envs.mix", "envs.tools.", "envs.datasets.", "label.judge", "evaluation.judge")
"""Tables with keys, or components, of their own."""
APP = make_app()
COMMANDS = list(generated.commands_of(APP))
RECIPES = sorted(path.stem for path in (ROOT / "configs" / "recipes").glob("*.toml"))


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.name)
def test_block_of_commands_says_how_it_is_tested(block):
    assert block.language in SHELLS, f"{block.name}: mark the block as bash, or as console where it shows output"
    run, need = block.marks.get("runs"), block.marks.get("needs")
    assert (run in RUNS) != (need in NEEDS), f"{block.name}: say above it <!-- runs: ... --> or <!-- needs: ... -->"
    assert block.commands, f"{block.name} shows no command: a console's begin with '$ '"
    if by := block.marks.get("by"):
        runners = [
            line for other in blocks_of(ROOT / by) if other.marks.get("runs") == "slow" for line in other.commands
        ]
        assert {" ".join(words_of(line)) for line in block.commands} <= {" ".join(words_of(line)) for line in runners}


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.name)
def test_documented_command_is_one_and_its_settings_exist(block, tmp_path, monkeypatch):
    fill(tmp_path, block.page)
    monkeypatch.chdir(tmp_path)
    for command in block.commands:
        words = words_of(command)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
        elif "agentflow" in words[:3]:
            check_command(words[words.index("agentflow") + 1 :])
        elif words[0] == "make":
            done = subprocess.run(["make", "-n", *words[1:]], env=environment(), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (tmp_path / words[1]).is_file(), f"{block.name}: {words[1]} does not exist"


def check_command(arguments):
    if arguments[0] == "help":
        arguments = [*arguments[1:], "--help"]
    _, bound, _ = APP.parse_args(arguments)
    if arguments[0] == "init":
        init(*bound.args)
    if "given" in bound.signature.parameters:
        run_config(bound.arguments.get("given", ()), backend=bound.arguments.get("backend"))


def test_commands_named_in_the_text_exist():
    placeholder = re.compile(r"\.\.\.|[…\[|]|\b[A-Z][A-Z]*\b|NAME")
    for page in PAGES:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`(agentflow [^`]+)`", text):
            _, name, *arguments = words_of(" ".join(span.split()))
            if name.startswith("-") or name == "help":
                continue
            assert name in COMMANDS, f"{page.name}: `{span}`"
            if arguments and not placeholder.search(span):
                APP.parse_args([name, *arguments])
        for script in re.findall(r"`python (\S+\.py)[^`]*`", text):
            assert (ROOT / script).is_file(), f"{page.name}: {script}"
        for target in re.findall(r"`make ([a-z-]+)[^`]*`", text):
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), f"{page.name}: make {target}"


@pytest.mark.parametrize("block", QUICK, ids=lambda block: block.name)
def test_quick_command_does_what_the_page_says(block, tmp_path):
    fill(tmp_path, block.page)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.script],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{block.script}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def test_every_command_and_every_recipe_is_explained():
    commands, recipes = ((DOCS / name).read_text(encoding="utf-8") for name in ("commands.md", "recipes.md"))
    assert [name for name in COMMANDS if f"`agentflow {name}" not in commands] == []
    assert [name for name in RECIPES if f"<!-- recipe: {name} -->" not in recipes] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_pages_are_whole_as_files_and_say_what_the_code_says(page):
    """After a change of settings, recipes, commands or the README's numbers: `make pages`."""
    text = page.read_text(encoding="utf-8")
    assert generated.filled(text) == text
    assert len(re.findall(r"<!-- (?:generated|recipe|agent): ", text)) == text.count("<!-- end -->")


def test_every_setting_recipe_and_command_can_be_read_in_the_files():
    settings, recipes, commands = (
        (DOCS / name).read_text(encoding="utf-8") for name in ("settings.md", "recipes.md", "commands.md")
    )
    assert [name for name in settings_of(RunConfig) if f"| `{name.rpartition('.')[2]}` |" not in settings] == []
    for name in RECIPES:
        assert (ROOT / "configs" / "recipes" / f"{name}.toml").read_text(encoding="utf-8").strip() in recipes
    assert [name for name in COMMANDS if f"Usage: agentflow {name}" not in commands] == []
    for text in (settings, recipes, commands):
        assert "??? " not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_what_the_loops_page_finds_in_a_file_stands_there():
    page = DOCS / "the-loop.md"
    named = re.findall(r"\]\((\.\./[\w/]+\.py)\) `(\w+)`", page.read_text())
    assert len(named) > 10
    for place, name in named:
        code = (DOCS / place).read_text()
        assert re.search(rf"^\s*(async def|def|class) {name}\b", code, re.MULTILINE), (place, name)


def test_the_way_of_one_group_is_as_long_as_its_page_says():
    way = (DOCS / "the-loop.md").read_text().partition("## The way of one group")[2]
    carried = "".join(row.split("|")[-2] for row in way.splitlines() if row.startswith("|"))
    files, types = set(re.findall(r"\]\(\.\./([\w/]+\.py)\)", way)), set(re.findall(r"`(\w+)`", carried))
    assert f"These are {len(files)} files and {len(types)} types." in way


def test_settings_named_in_the_text_exist():
    components = "|".join(RunConfig.model_fields)
    known = {*settings_of(RunConfig), *RunConfig.model_fields}
    named = re.compile(rf"`(?:[^`\n]* )?'?((?:{components})\.[a-z_]+(?:\.[a-z_]+)*)(?:[= ][^`\n]*)?`")
    for page in PAGES:
        for name in named.findall(page.read_text(encoding="utf-8")):
            room, part, *_ = name.split(".")
            if part in ("py", "json", "jsonl") or (ROOT / room / f"{part}.py").exists():
                continue  # a file or a module, not a setting
            found = [one for one in known if one == name or one.startswith(f"{name}.")]
            assert found or name.startswith(OPEN_TABLES), f"{page.name}: {name}"


def test_tests_named_in_the_pages_are_there():
    for page in PAGES:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text(encoding="utf-8")):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"
            assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{page.name}: {name}"


def test_recipe_in_a_page_can_be_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        fill(tmp_path, page)
        for name in files_of(page):
            if name.endswith(".toml"):
                load_run_config(tmp_path / name)


def test_own_prompt_of_the_page_is_read_as_it_says(tmp_path, monkeypatch):
    fill(tmp_path, DOCS / "tasks.md")
    monkeypatch.chdir(tmp_path)
    prompt = load_run_config(tmp_path / "prompted.toml").planner.prompt
    assert prompt.instructions.startswith("Solve the task with as few tools as it takes.")
    [example] = prompt.examples
    assert example.startswith("Task: A crate of tiles weighs 31 kg.")
    assert example.endswith("""Result: 372\n{"thought":"That is it.","action":"answer","action_input":"372"}""")


def test_own_questions_of_the_page_are_tasks(tmp_path):
    (tmp_path / "questions.jsonl").write_text(files_of(DOCS / "tasks.md")["questions.jsonl"])
    found = own_tasks("own_text", tmp_path / "questions.jsonl")
    assert sum(map(len, found.values())) == 2


def test_own_tasks_reward_and_loss_of_the_page_do_what_it_says(tmp_path, monkeypatch):
    fill(tmp_path, DOCS / "tasks.md")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_run_config(tmp_path / "fields.toml")
    own = OwnSources.of(config)
    [task] = [task for task in own.tasks("fields", "eval") if task.answer == "121"]
    assert [score_answer(task, answer) for answer in ("121", "119", "118", "many")] == [1.0, 0.5, 0.0, 0.0]
    ones = torch.ones(2, 3)
    inputs = LossInputs(
        learner_logprobs=-ones,
        rollout_logprobs=-ones,
        advantages=ones,
        loss_mask=ones,
        num_loss_tokens=6,
        num_trajectories=2,
        correction=config.learner.correction,
    )
    # Six tokens of advantage 1 over two trajectories of 120.
    assert policy_loss(config.learner.loss)(inputs).loss.item() == pytest.approx(-6 / 240)


async def test_own_tools_of_the_page_do_what_it_says(tmp_path, monkeypatch):
    fill(tmp_path, DOCS / "tools.md")
    monkeypatch.syspath_prepend(tmp_path)
    sources = {"weather": {"source": "my_tools:weather"}, "counter": {"source": "my_counter:Counter"}}
    with (
        Toolbox(EnvsConfig(actions=("weather", "counter", "answer"), tools=sources)) as toolbox,
        toolbox.episode() as (weather, counter, _),
    ):
        assert f"`weather: {weather.description}`" in (DOCS / "tools.md").read_text()
        result = await weather.call('{"city":"Oslo","days":null,"unit":"F"}')
        assert result.text == "Oslo: 3 days of 12 degrees F"
        assert [(await counter.call("")).text for _ in range(2)] == ["1", "2"]


def test_own_family_of_the_page_draws_tasks_that_its_plan_solves():
    [source] = [block.text for block in blocks_of(DOCS / "tasks.md") if "def draw_change" in block.text]
    names = dict(vars(families))
    exec(source, names)
    problem = names["draw_change"](families.random.Random(0), ())
    assert eval(problem.plan[0].action_input) == problem.answer == int(problem.plan[-1].action_input)


def test_the_picture_of_the_loop_can_be_read_on_a_phone_and_in_the_dark():
    picture = (DOCS / "images" / "loop.svg").read_text(encoding="utf-8")
    width = float(re.search(r'viewBox="0 0 (\d+)', picture)[1])
    sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', picture)]
    assert min(sizes) * 390 / width > 11
    assert "@media (prefers-color-scheme: dark)" in picture
    outside_of_style = picture.partition("</style>")[2]
    assert not re.search(r"#[0-9a-f]{3,6}\b(?!\))", outside_of_style.replace("url(#a)", ""))


def test_readme_says_first_what_it_is_and_shows_it():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = "\n".join(readme.splitlines()[:24])
    assert "docs/images/viewer-group.png" in first
    assert "make train" in first
    assert "AUROC" not in first
    assert "McNemar" not in first
    order = ["make train", "learning-curve.png", "<!-- the demo's numbers -->", "(LICENSE)", "## The numbers"]
    assert [readme.index(part) for part in order] == sorted(readme.index(part) for part in order)


def test_the_licence_is_named_where_it_is_looked_for():
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")[:200]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# --- messages ------------------------------------------------------------------------------------


def test_quoted_messages_are_those_of_the_code():
    """Each piece between two `…` stands in a source; strings that go over several lines are joined first."""
    rooms = ("configs", "envs", "rollout", "learner", "reward", "actors", "ray_jobs")
    sources = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    said = "\n".join(path.read_text(encoding="utf-8") for path in (*sources, ROOT / ".ci" / "setup"))
    said = re.sub(r'"\s*\n\s*f?"', "", said).replace("`", "").replace("\\'", "'")
    said = re.sub(r"[\"'] else [\"']|\{[^{}\n]*\}", "…", said)
    quoted = re.findall(r"^> .*", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quoted) > 30
    for line in quoted:
        for message in re.findall(r"`([^`]+)`", line):
            pieces = [piece.strip() for piece in message.split("…")]
            unknown = [piece for piece in pieces if len(piece) > 3 and piece not in said]
            assert unknown == [], f"nothing says {unknown} of: {message}"


# --- the site ------------------------------------------------------------------------------------


class Outside(HTMLParser):
    """What a page would load from elsewhere; links to be clicked are none of it."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def handle_starttag(self, tag, attributes):
        if tag in ("script", "link", "img", "iframe", "source", "video"):
            for name, value in attributes:
                if name in ("src", "href") and re.match(r"(https?:)?//", value or ""):
                    self.loaded.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built where no proxy answers: what needs the network fails."""
    target = tmp_path_factory.mktemp("site")
    dead = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        env={**environment(), **dead, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def test_site_has_every_page_and_loads_nothing_from_elsewhere(site):
    assert {page.stem for page in DOCS.glob("*.md")} <= {page.stem for page in site.glob("*.html")}
    for page in site.rglob("*.html"):
        outside = Outside()
        outside.feed(page.read_text(encoding="utf-8"))
        assert outside.loaded == [], page.name
    assert (site / "search" / "search_index.js").is_file()
    assert "iframe-worker" in (site / "assets" / "iframe-worker.js").read_text()[:100]


def test_formulas_are_drawn_without_a_script(site):
    page = (site / "algorithms.html").read_text(encoding="utf-8")
    assert page.count('display="block"') >= 10
    assert "<mfrac>" in page
    assert "\\frac" not in page


def test_every_setting_is_on_its_page_with_its_meaning(site):
    page = (site / "settings.html").read_text(encoding="utf-8")
    assert "<code>pipeline_depth</code>" in page
    assert "Batches that rollouts may run ahead (D)" in page
    assert [name for name in settings_of(RunConfig) if f"<code>{name.rpartition('.')[2]}</code>" not in page] == []
    assert [name for name, field in settings_of(RunConfig).items() if not field.description] == []


def settings_of(model, path=""):
    found = {}
    for name, field in model.model_fields.items():
        inner = field.annotation
        if types := types_of(inner):
            for one in types.values():
                found |= settings_of(one, f"{path}{name}.")
            found[f"{path}{name}.type"] = field
        elif isinstance(inner, type) and hasattr(inner, "model_fields"):
            found |= settings_of(inner, f"{path}{name}.")
        elif not f"{path}{name}.".startswith(OPEN_TABLES[1:]):
            found[f"{path}{name}"] = field
    return found
