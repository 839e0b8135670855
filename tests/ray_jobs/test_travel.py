"""What a job's package holds: what Ray packs, what the recipe names, and no key."""

import shlex
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray._private.runtime_env.packaging import create_package

from configs.errors import UserError
from ray_jobs import travel
from ray_jobs.cli import main
from ray_jobs.travel import LEFT_BEHIND, check_no_key_travels, travelling

BODY = "q8Zr4Tn1Vb7Kx2LmPw5Y"
TASKS = "def load():\n    return [{'question': f'q{n}', 'answer': '1'} for n in range(40)]\n"
OWN_MIX = """envs.mix={own=1.0} "envs.datasets={own={source='my_tasks:load'}}" """
OWN_AGENT = "cold_start.num_demonstrations=0 agent"
MCP_URL = "source='mcp:https://host/weather.py',description='x'"
MCP = "source='mcp:python recipes/agent.py#t',description='x'"
PLAIN = "envs.mix={mine=1.0} envs.datasets.mine.source=data/tasks.jsonl"
PATTERNS = st.sampled_from(
    ["*", "!*.py", "!*.toml", ".*", "a", "a/", "!a", "!a/", "/b.py", "a/*", "**/c.toml", "!.gitignore"]
)


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from([".gitignore", ".rayignore", "a/.gitignore", "a/d/.rayignore"]), st.lists(PATTERNS))
)
def test_files_that_travel_are_those_that_ray_packs(tmp_path_factory, ignores):
    folder = tmp_path_factory.mktemp("any") / "project"
    names = ("b.py", "c.toml", ".x", "a/b.py", "a/c.toml", "a/d/b.py", "a/d/.env", "runs/a/c.toml")
    write(folder, dict.fromkeys(names, "1") | {name: "\n".join(lines) for name, lines in ignores.items()})
    create_package(str(folder), folder.parent / "p.zip", include_gitignore=True, excludes=[*LEFT_BEHIND])
    packed = {name for name in zipfile.ZipFile(folder.parent / "p.zip").namelist() if not name.endswith("/")}
    assert {str(file.relative_to(folder)) for file in travelling(folder, LEFT_BEHIND)} == packed


OWN_CODE = {
    "recipes/my_reward.py": "",
    "recipes/agent.py": "",
    "tool/__init__.py": "",
    "tool/__main__.py": "",
    "my_tasks.py": TASKS,
    "conf/a.yaml": "",
    "data/tasks.jsonl": "{}",
}
OWN_REWARD = "reward.scorer=my_reward:score"


@pytest.mark.parametrize(
    ("ignored", "arguments", "named"),
    [
        (".gitignore: .*\n!.gitignore", "", "recipe"),
        ("recipes/.gitignore: *\n!.gitignore\n!*.toml", "", "recipe"),
        ("env.yaml: excludes: ['*', '!recipes', '!recipes/']", "--runtime-env env.yaml", "recipe"),
        (".gitignore: my_*.py", OWN_REWARD, "my_reward.py"),
        (".gitignore: my_tasks.py", OWN_MIX, "my_tasks.py"),
        (".gitignore: agent.py", f"{OWN_AGENT}.command='python agent.py'", "agent.py"),
        (".gitignore: conf", f"{OWN_AGENT}.command='python agent.py . --conf=conf/a.yaml'", "conf/a.yaml"),
        (".gitignore: my_tasks.py", f"{OWN_AGENT}.command='python -m my_tasks'", "my_tasks.py"),
        (".rayignore: __init__.py", f"{OWN_AGENT}.command='python -m tool'", "tool/__init__.py"),
        (".gitignore: my_tasks.py", f"{OWN_AGENT}.function=my_tasks:load", "my_tasks.py"),
        (".gitignore: agent.py", f'"envs.tools={{t={{{MCP}}}}}"', "agent.py"),
        (".gitignore: *.jsonl", PLAIN, "data/tasks.jsonl"),
        ("../tasks.jsonl: {}", PLAIN.replace("data/", "../"), "../tasks.jsonl"),
        (".gitignore: data", "envs.web.blocked_questions=data/tasks.jsonl", "blocked_questions"),
        ("model/w.safetensors: ", "model.path=model", "model/w.safetensors"),
        ("runs/old/prm/prm.json: {}", "reward.credit.prm_path=runs/old/prm", "runs/old/prm/prm.json"),
        ("runs/old/v1: ", "--phase evaluate --options='--adapter runs/old'", "runs/old/v1"),
        (".gitignore: *.log\n.cache", f"{PLAIN} {OWN_REWARD} model.path=owner/name", None),
        (".gitignore: __pycache__", f"{OWN_AGENT}.command='python agent.py . host:80 {'long ' * 99}{'x' * 999}'", None),
        ("", f'"envs.tools={{t={{{MCP_URL}}}}}" "envs.datasets={{a={{source=\'hf:gsm8k\'}}}}"', None),
        ("", "model.path=/mnt/models/qwen envs.mix={mine=1.0} envs.datasets.mine.source=/mnt/data.jsonl", None),
    ],
)
def test_what_a_recipe_names_travels_or_is_refused_by_its_name(ignored, arguments, named, project, server, capsys):
    name, _, text = ignored.partition(": ")
    write(project, OWN_CODE | ({name: text} if name else {}))
    credit = () if "credit" in arguments else ("reward.credit=outcome",)
    code = main(["submit", "recipes/mine.toml", *credit, *shlex.split(arguments)])
    error = capsys.readouterr().err
    assert (code, len(server.submitted)) == ((0, 1) if named is None else (2, 0)), error
    assert named is None or named in error


KEY_FILES = """
.ssh/id_ed25519 id_rsa ID_RSA.bak .aws/credentials .git-credentials .npmrc .pypirc .pgpass .envrc .kube/config a.p12
.docker/config.json .huggingface/token .vault-token .ray/auth_token b.PFX Prod.Env SERVER.PEM .Env.local token
kubeconfig credentials.json Secrets.toml service-account.json deep/er/Service_Account_prod.JSON .Netrc store.JKS
client_secret_1.json
"""


def test_key_files_stay_whatever_their_case_and_the_patterns_of_the_user(tmp_path):
    harmless = {"tokenizer.json", "keys.py", "monkey.key.md", "environment.yaml"}
    write(tmp_path, dict.fromkeys([*KEY_FILES.split(), *harmless], "x"))
    assert {file.name for file in travelling(tmp_path, ["!*", "!**", *LEFT_BEHIND])} == harmless


CERTAIN = (
    "-----BEGIN OPENSSH PRIVATE KEY-----",
    '"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIE',
    "-----BEGIN PGP PRIVATE KEY BLOCK-----",
    f"hf_{BODY}abc",
    f"url = postgres://me:{BODY}@db/x",
    "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    f'"accountKey": "{BODY}=="',
    f"CLIENT_SECRET: {BODY}",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOi{BODY}.x",
    "value-of-a-variable",
)
HARMLESS = (
    'model_key = "Qwen2ForSequenceClassification"',
    "cache_key = make_Cache_Key_For2(value)",
    'f"postgres://{user}:{password}@{host}/db" or postgres://me:<password>@h or https://me:${TOKEN}@h',
    "iVBORw0KGgo/eyJhbGciOiJIUzI1NiJ9abcdefghij+AAAA",
    '{"key": "q8Zr4Tn1Vb7Kx2LmPw5Y", "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}',
    "token_ids = tokenizer.encode(text)[:20]",
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ me@host",
)


@pytest.mark.parametrize(
    "encode", [str.encode, lambda text: text.encode("utf-16"), lambda text: b"\xff\x00\n" + text.encode()]
)
@pytest.mark.parametrize("text", [*CERTAIN, *HARMLESS])
def test_a_file_with_a_key_is_refused_with_its_line_and_without_the_key(text, encode, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "value-of-a-variable")
    (tmp_path / "notes.md").write_bytes(encode(f"first\nsecond {text}\nthird\n"))
    if text in HARMLESS:
        check_no_key_travels([tmp_path / "notes.md"])
        return
    with pytest.raises(UserError, match=r"notes\.md.*line [23]") as caught:
        check_no_key_travels([tmp_path / "notes.md"])
    assert BODY not in str(caught.value)
    assert "wJalr" not in str(caught.value)


@pytest.mark.parametrize("place", ["notes.md", "lib/mod/data.txt"])
def test_a_key_in_the_folder_or_in_a_module_that_is_sent_along_is_refused(
    place, project, server, capsys, tmp_path_factory
):
    lib = tmp_path_factory.mktemp("libs")
    (project / "env.yaml").write_text(f"py_modules: ['{lib}/lib']")
    write(lib, {"lib/mod/data.txt": "", "lib/.env": BODY})
    write(lib if place.startswith("lib") else project, {place: f"hf_{BODY}abc"})
    assert main(["submit", "recipes/mine.toml", "--runtime-env", "env.yaml"]) == 2
    assert place in capsys.readouterr().err
    assert server.submitted == []


def test_an_address_that_is_given_goes_before_that_of_the_environment(project, server, monkeypatch):
    from ray.dashboard.utils import get_address_for_submission_client

    monkeypatch.setenv("RAY_ADDRESS", "http://other:8265")
    assert main(["submit", "recipes/mine.toml", "--address", "http://here:8265"]) == 0
    assert get_address_for_submission_client(None) == "http://here:8265"


def test_own_checkout_travels_without_its_made_up_keys():
    root = Path(travel.__file__).parents[1]
    check_no_key_travels(travelling(root, ["/tests/", *LEFT_BEHIND]))
