"""Sources of API keys, and detection of keys in settings."""

import os
import subprocess
import sys
import traceback

import pytest

from actors.cluster import reason_of
from configs.api_keys import (
    ApiKeyError,
    certain_key,
    exposed_key,
    find_key,
    names_a_secret,
    without_secrets,
    written_secret,
)
from configs.envs import ToolConfig
from configs.errors import UserError
from configs.loading import load_run_config
from configs.plugins import load_own
from envs.tools.toolbox import Toolbox
from reward.judging import failed_summary

KEY = "canary0123456789"
TOOL = ("envs.tools={t={source='fails_when_made:Tool'}}", 'envs.actions=["t", "answer"]')


def _raise(error):
    raise error


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    for name in ("MY_KEY", "MY_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_key_comes_from_the_variable_else_from_the_file_that_another_names(monkeypatch, tmp_path):
    assert find_key("MY_KEY") is None
    (tmp_path / "key").write_text(f"{KEY}-of-file\n")
    monkeypatch.setenv("MY_KEY_FILE", str(tmp_path / "key"))
    assert find_key("MY_KEY") == f"{KEY}-of-file"
    monkeypatch.setenv("MY_KEY", f" {KEY} ")
    assert find_key("MY_KEY") == KEY


@pytest.mark.parametrize("content", [f"{KEY}\nsecond", "", f"{KEY}\x00", f"{KEY}ü", b"\xff" + KEY.encode(), None])
def test_a_bad_key_file_is_reported_without_its_content(content, monkeypatch, tmp_path):
    if content is not None:
        (tmp_path / "key").write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("MY_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(ApiKeyError) as caught:
        find_key("MY_KEY")
    assert "MY_KEY_FILE" in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_key_from_a_file_is_redacted_and_a_pipe_with_one_is_left_to_its_reader(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv("OTHER_API_KEY_FILE", str(tmp_path / "pipe"))
    (tmp_path / "key").write_text("from-a-file/1\n")
    monkeypatch.setenv("SOME_API_KEY_FILE", str(tmp_path / "key"))
    assert without_secrets("from-a-file/1 ?k=from-a-file%2F1") == "[SOME_API_KEY] ?k=[SOME_API_KEY]"
    assert written_secret("say from-a-file/1") == "SOME_API_KEY"


SAID = """
import logging, os, sys
from rich.console import Console
from configs.api_keys import find_key, redact_output
logging.basicConfig()
redact_output()
find_key("MY_SERVICE")
print("plain")
os.environb[b"DB_PASSWORD"] = b"no UTF-8: \\xe4"
os.environ["LATE_TOKEN"] = os.environ["HF_TOKEN"][::-1]
for name in ("HF_TOKEN", "MY_SERVICE", "LATE_TOKEN"):
    print(os.environ[name], {"quoted": os.environ[name]})
    print(os.environ[name], file=sys.stderr)
    sys.stdout.writelines([os.environ[name]])
    Console(soft_wrap=True).print(os.environ[name], markup=False)
    logging.warning("%s", os.environ[name])
raise RuntimeError(os.environ["HF_TOKEN"])
"""


def test_output_logs_and_tracebacks_of_a_process_hold_no_key():
    keys = {"HF_TOKEN": f"{KEY}-\\-'", "MY_SERVICE": f"{KEY}-service"}
    ran = subprocess.run([sys.executable, "-c", SAID], capture_output=True, text=True, env=os.environ | keys)
    assert ran.stderr.endswith("RuntimeError: [HF_TOKEN]\n")
    assert ran.stdout.count("[MY_SERVICE]") == ran.stdout.count("[LATE_TOKEN]") == 4
    assert not any(key in ran.stdout + ran.stderr for key in (KEY, KEY[::-1]))


@pytest.mark.parametrize(
    "fail",
    [
        lambda: load_own("fails_on_import:solve", key="agent.function"),
        lambda: Toolbox(load_run_config(None, TOOL).envs).__enter__(),
        lambda: _raise(UserError(failed_summary(RuntimeError(KEY)).reason)),
        lambda: _raise(UserError(reason_of(RuntimeError(f"failed with {KEY}")))),
    ],
)
def test_words_of_custom_code_are_redacted_with_their_causes(fail, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", KEY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "fails_on_import.py").write_text(f"raise ValueError('no access with {KEY}')")
    (tmp_path / "fails_when_made.py").write_text(f"class Tool:\n    def __init__(self): raise ValueError('{KEY}')")
    with pytest.raises(UserError) as caught:
        fail()
    assert "[HF_TOKEN]" in str(caught.value)
    assert KEY not in "".join(traceback.format_exception(caught.value)).replace(f'f"{KEY}', "")


SECRET = ("HF_TOKEN", "TAVILY_API_KEY", "AWS_SECRET_ACCESS_KEY", "--api-key", "tavilyApiKey")
HARMLESS = ("TOKENIZERS_PARALLELISM", "max_tokens", "TAVILY_API_KEY_FILE", "keyword", "monkey")


@pytest.mark.parametrize("name", SECRET + HARMLESS)
def test_names_of_secrets(name):
    assert names_a_secret(name) == (name in SECRET)


EXPOSED = [
    (f"https://h/mcp?apiKey={KEY}", "as 'apiKey'"),
    (f"https://h/mcp?a=1&access_token={KEY}", "as 'access_token'"),
    (f"https://me:{KEY}@h/mcp", "in the user part of the URL"),
    (f"https://{KEY}@h/mcp", "in the user part of the URL"),
    (f"npx server --api-key {KEY}", "as 'api-key'"),
    (f"npx server --token={KEY}", "as 'token'"),
    (f"npx server -token '{KEY}'", "as 'token'"),
    (f"env BRAVE_API_KEY={KEY} npx server", "as 'BRAVE_API_KEY'"),
    (f"sh -c 'BRAVE_API_KEY={KEY} exec server'", "as 'BRAVE_API_KEY'"),
    (f"npx mcp-remote https://h/mcp --header 'Authorization: Bearer {KEY}'", "as 'Authorization'"),
    (f"npx mcp-remote https://h/mcp --header X-Api-Key:{KEY}", "as 'X-Api-Key'"),
    (f"npx server sk-proj-{KEY}", "in the word that begins with 'sk-'"),
    (f"https://h/{'tvly-' + KEY}/mcp", "in the word that begins with 'tvly-'"),
    (f"npx server {KEY * 2}", "in a word of 32 or more letters and digits"),
    (f"https://h/mcp?u={KEY * 2}", "in a word of 32 or more letters and digits"),
]


@pytest.mark.parametrize(
    "text",
    [
        "https://h/mcp",
        "https://h:8/mcp?tools=a,b&profile=550e8400-e29b-41d4-a716-446655440000",
        "npx -y @modelcontextprotocol/server-brave-search@2024.11.5",
        "uvx pkg@0123456789abcdef0123456789abcdef01234567",
        "docker run -i --rm -e BRAVE_API_KEY image@sha256:0123456789abcdef0123456789abcdef0123456789abcdef",
        "npx token-counter server.js --max-tokens 100",
        "npx mcp-remote https://h/mcp --header Authorization:${AUTH}",
        "serve --token-file /run/secrets/token --key /etc/tls/key.pem",
        "python serve_monkey_business_in_a_very_long_script_name.py",
    ],
)
def test_what_holds_no_key_is_left_alone(text):
    assert exposed_key(text) is None


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"https://me:{KEY}@h/mcp", "in the user part of a URL"),
        (f"--out sk-proj-{KEY}", "in the word that begins with 'sk-'"),
        ("hf_q8Zr4Tn1Vb7Kx2Lmq8Zr4Tn1Vb7Kx2Lmxx", "in the word that begins with 'hf_'"),
        ("hf_transformers_loader:load", None),
        ("runs/hf_qwen2-5-7b-instruct", None),
        ("sk_learn_scorers:score", None),
        ('{url="http://h:80",package="@scope/name"}', None),
    ],
)
def test_certain_keys_and_names_that_begin_like_one(text, where):
    assert certain_key(text) == where


@pytest.mark.parametrize(("text", "where"), EXPOSED)
def test_a_key_in_an_address_is_found_and_a_recipe_with_it_is_refused_without_quoting_it(text, where):
    assert exposed_key(text) == where
    override = f"envs.tools={{lookup={{source={'mcp:' + text!r}, description='x'}}}}"
    if "'" in text:
        override = override.replace(repr("mcp:" + text), '"mcp:' + text + '"')
    with pytest.raises(UserError) as caught:
        load_run_config(None, [override, 'envs.actions=["lookup", "answer"]'])
    assert "envs.tools.lookup" in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        f"agent.memory={{type='server', url='https://q:6333/?api_key={KEY}'}}",
        f"backend={{type='openai', model='m', base_url='https://me:{KEY}@h/v1'}}",
        f"envs.base_generator.base_url=https://me:{KEY}@h/v1",
        f"backend={{type='openai', model='m', api_key_env='sk-{KEY}'}}",
        f"envs.base_generator.api_key_env=sk-{KEY}",
        f"agent.memory={{type='server', url='https://q', api_key_env='sk-{KEY}'}}",
        f"envs.tools={{a={{source='mcp:x', description='x', api_key_env='sk-{KEY}'}}}}",
        f"backend.api_key={KEY}",
        f"agent.memory.location=https://q:6333/?api_key={KEY}",
    ],
)
def test_no_message_about_a_setting_quotes_the_key_in_it(override):
    with pytest.raises(UserError) as caught:
        load_run_config(None, [override])
    assert KEY not in str(caught.value)


def test_the_key_of_an_mcp_server_is_named_and_goes_out_encrypted():
    ToolConfig(source="mcp:https://h/mcp", description="x", api_key_env="MY_KEY")
    ToolConfig(source="mcp:http://127.0.0.1:8765/mcp#code", description="x", api_key_env="MY_KEY")
    ToolConfig(source="mcp:npx server", description="x", api_key_env="MY_KEY")
    with pytest.raises(ValueError, match="source"):
        ToolConfig(source="mcp:http://h/mcp", description="x", api_key_env="MY_KEY")
    with pytest.raises(ValueError, match="api_key_env"):
        ToolConfig(source="my_tools:Weather", api_key_env="MY_KEY")
