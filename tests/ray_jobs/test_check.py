"""`agentflow check`: recipes that look right and cannot work, and those that work."""

import json
import sys

import pytest

from configs.errors import UserError
from ray_jobs.cli import main, run_config
from ray_jobs.run.folder import write_json

CODE = """
def right(task, answer): return float(answer == task.answer)
def constant(task, answer): return 0.0
def negative(task, answer): return 1.0 if answer == task.answer else -1.0
def by_deeds(task, answer, turns): return float(len(turns) > 5)

async def ask(client, question, **options):
    reply = await client.chat.completions.create(messages=[{"role": "user", "content": question}], **options)
    return reply.choices[0].message.content

async def agent(task, client): return await ask(client, task.question, model="policy")
async def other_model(task, client): return await ask(client, task.question, model="gpt-4o-mini")
async def generator(task, client): yield "x"
async def gives_up(task, messages, tools): return "unknown"
async def knows_some(task, messages, tools): return task.answer if int(task.answer[4:]) % 3 else "unknown"
"""
SERVER = """
from fastmcp import FastMCP
server = FastMCP("two")
@server.tool
def find(query: str) -> str: return "found " + query
@server.tool
def other(query: str) -> str: return query
server.run()
"""
RECIPE = """
model.path = "demo"
cold_start.num_demonstrations = 0
evaluation = { num_tasks = 8, num_untouched_tasks = 0 }
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    (tmp_path / "checked_code.py").write_text(CODE)
    (tmp_path / "server.py").write_text(SERVER)
    rows = [{"question": f"Name city {number * 37}.", "answer": f"city{number}"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def check(*settings, own=True):
        scorer = "" if any("reward.scorer" in one for one in settings) else ", scorer='text'"
        own_rows = ("envs.mix={mine=1.0}", f"envs.datasets={{mine={{source='rows.jsonl'{scorer}}}}}") if own else ()
        code = main(["check", "recipe.toml", *own_rows, *settings])
        lines = [line for text in capsys.readouterr() for line in text.splitlines()]
        return code, [line for line in lines if line.startswith("problem ")], lines

    return check


TAUGHT = ("agent.function=checked_code:agent", "cold_start.num_demonstrations=9", "cold_start.min_score=1.0")
NO_SEARCH = 'envs.actions=["think", "answer"]'


def mcp(source, description=', description="find"'):
    tool = f'envs.tools={{find={{source="mcp:{source}"{description}}}}}'
    return 'envs.actions=["think", "find", "answer"]', tool


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (mcp("python nope.py#find"), "MCP"),
        (mcp("http://127.0.0.1:9/mcp#find"), "127.0.0.1:9"),
        (mcp(f"{sys.executable} server.py#findd"), "findd"),
        (mcp(f"{sys.executable} server.py"), "#name"),
        ((NO_SEARCH, "reward.scorer=checked_code:constant"), "reward"),
        ((NO_SEARCH, "reward.scorer=checked_code:negative"), "checked_code:negative"),
        ((), "envs.search"),
        (("agent.function=checked_code:generator",), "checked_code:generator"),
        ((*TAUGHT, "cold_start.function=checked_code:gives_up"), "cold_start.min_score"),
        (("agent.function=checked_code:other_model",), "gpt-4o-mini"),
    ],
)
def test_recipe_that_cannot_work_is_found(check, settings, named):
    code, problems, _ = check(*settings)
    assert code == 1
    assert problems
    assert all(named in line for line in problems)


@pytest.mark.parametrize(
    "settings",
    [
        mcp(f"{sys.executable} server.py#find"),
        mcp(f"{sys.executable} server.py#find", ""),
        mcp(f"{sys.executable} server.py#*", ""),
        (NO_SEARCH, "reward.scorer=checked_code:right"),
        (NO_SEARCH, "reward.scorer=checked_code:by_deeds"),
        ("agent.function=checked_code:agent",),
    ],
)
def test_recipe_that_works_passes(check, settings):
    code, problems, lines = check(*settings)
    assert (code, problems) == (0, [])
    assert lines[-1].startswith("OK")


def test_best_attempts_of_a_teacher_and_the_sizes_of_finite_data_are_shown(check):
    code, problems, lines = check(*TAUGHT, "cold_start.function=checked_code:knows_some")
    assert (code, problems) == (0, [])
    attempts = [line for line in lines if line.startswith("attempts ") and "score" in line]
    assert [line.endswith("score 1.0") for line in attempts] == [True, True]
    assert any("not 9" in line for line in lines)


def test_generated_tasks_are_solved_by_their_plans(check):
    code, problems, lines = check("envs.mix={two_lookup=1.0}", "agent.max_steps=6", own=False)
    assert (code, problems) == (0, [])
    assert sum("score 1.0" in line for line in lines) == 2


def test_reference_that_is_no_answer_is_no_problem(check):
    code, problems, _ = check("envs.mix={game24=1.0}", 'envs.actions=["code", "answer"]', own=False)
    assert (code, problems) == (0, [])


@pytest.mark.parametrize(
    ("source", "named"), [("nope.py#find", "envs.tools.find"), ("server.py", "#other"), ("server.py#findd", "findd")]
)
def test_server_that_is_asked_for_descriptions_and_has_none_names_the_tool(check, source, named):
    code, _, lines = check(*mcp(f"{sys.executable} {source}", ""))
    assert (code, named in " ".join(lines)) == (2, True)


@pytest.mark.usefixtures("check")
def test_all_tools_of_a_server_do_not_replace_another_tool():
    own = f'envs.tools={{two={{source="mcp:{sys.executable} server.py#*"}}, find={{source="checked_code:ask"}}}}'
    with pytest.raises(UserError, match="find"):
        run_config(["recipe.toml", 'envs.actions=["two", "find", "answer"]', own])


@pytest.mark.usefixtures("check")
def test_all_tools_of_a_server_become_actions_with_its_descriptions(tmp_path):
    envs = run_config(["recipe.toml", *mcp(f"{sys.executable} server.py#*", "")]).envs
    assert envs.actions == ("think", "find", "other", "answer")
    assert envs.tools["other"].source.endswith("server.py#other")
    assert "query" in envs.tools["other"].description
    # A run that has them needs no server to be loaded again.
    (tmp_path / "runs" / "run").mkdir(parents=True)
    write_json(tmp_path / "runs" / "run" / "config.json", {"envs": envs.model_dump(mode="json")})
    (tmp_path / "server.py").unlink()
    assert run_config(["recipe.toml", *mcp(f"{sys.executable} server.py#*", "")]).envs == envs
