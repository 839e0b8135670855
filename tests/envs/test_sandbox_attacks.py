"""The attack corpus: whatever the code tries, nothing outside its cell is read, changed, reached or left."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from envs.sandbox import Sandbox, SandboxSettings
from envs.tools.python_code import PythonCodeTool
from envs.types import ToolResult

_HERE = Path(__file__).parent
_GOLDEN = _HERE.parents[2] / "shared" / "golden" / "attacks_public.json"
_TIMEOUT_S, _PUBLIC_TIMEOUT_S, _HANG_TIMEOUT_S = 2.0, 0.5, 0.3
_SLACK_S = 10.0  # generous: a loaded machine kills and buries late, a broken one never
_VALUE = "CANARY_SECRET_5f1d"
# Every configuration of layers must keep the host whole. Without seccomp the code may make calls that end
# in its own cell, so there only the canaries count.
_CONFIGURATIONS = {
    "all-layers": frozenset[str](),
    "without-landlock": frozenset({"landlock"}),
    "without-seccomp": frozenset({"seccomp"}),
}


@dataclass(frozen=True, slots=True)
class Canaries:
    """Things on the host that no code may read, change or connect to."""

    directory: Path
    listeners: tuple[socket.socket, ...]

    @property
    def file(self) -> Path:
        return self.directory / "secret.txt"

    def place_in(self, code: str) -> str:
        port = self.listeners[0].getsockname()[1]
        name = self.listeners[-1].getsockname()[1:].decode()
        for mark, value in (
            ("CANARY_PORT", str(port)),
            ("CANARY_FILE", str(self.file)),
            ("CANARY_DIR", str(self.directory)),
            ("CANARY_NAME", name),
            ("CANARY_PID", str(os.getpid())),
        ):
            code = code.replace(mark, value)
        return code

    def touched(self) -> list[str]:
        signs = []
        if os.listdir(self.directory) != ["secret.txt"] or self.file.read_text() != _VALUE:
            signs.append("a file of the host changed")
        for listener in self.listeners:
            try:
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(1)
                else:
                    listener.accept()[0].close()
                signs.append(f"{listener.family.name} was reached")
            except BlockingIOError:
                continue
        return signs


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canaries]:
    directory = tmp_path_factory.mktemp("canary")
    (directory / "secret.txt").write_text(_VALUE)
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(tcp.getsockname())
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0canary-{os.getpid()}")
        abstract.listen()
        for listener in (tcp, udp, abstract):
            listener.setblocking(False)
        os.environ["CANARY_ENV"] = _VALUE
        stack.callback(os.environ.pop, "CANARY_ENV")
        yield Canaries(directory, (tcp, udp, abstract))


@pytest.fixture(scope="module")
def sandbox_of(canaries: Canaries) -> Iterator[Callable[[str], Sandbox]]:
    """The running sandbox of each configuration, started at first use."""
    with ExitStack() as stack:

        @cache
        def start(configuration: str) -> Sandbox:
            disabled = _CONFIGURATIONS[configuration]
            settings = SandboxSettings(
                check_imports=False,
                disabled_layers=disabled,
                required_layers=frozenset({"namespaces", "rlimits", "seccomp"}) - disabled,
            )
            return stack.enter_context(Sandbox(settings))

        yield start


def _own_attacks() -> list[dict[str, Any]]:
    return json.loads((_HERE / "attacks.json").read_text())


def _corpus() -> list[Any]:
    """What runs into its time limit does so under any layers, so it runs once."""
    public = json.loads(_GOLDEN.read_text()) if _GOLDEN.exists() else []
    slow = {"timeout_s": _PUBLIC_TIMEOUT_S}
    return [
        pytest.param(name, attack, id=f"{name}-{attack['id']}-{attack['category']}")
        for name, disabled in _CONFIGURATIONS.items()
        for attack in _own_attacks() + [attack | slow for attack in public]
        if not (disabled and attack.get("hangs"))
    ]


@pytest.mark.parametrize(("configuration", "attack"), _corpus())
def test_attack_is_held(
    sandbox_of: Callable[[str], Sandbox], canaries: Canaries, configuration: str, attack: dict[str, Any]
) -> None:
    target = sandbox_of(configuration)
    code = canaries.place_in(attack["code"])
    timeout_s = _HANG_TIMEOUT_S if attack.get("hangs") else attack.get("timeout_s", _TIMEOUT_S)
    for _ in range(attack.get("repeat", 1)):
        start = time.monotonic()
        result = target.run(code, timeout_s=timeout_s)
        elapsed_s = time.monotonic() - start
    assert canaries.touched() == []
    assert _VALUE not in result.text
    assert elapsed_s < timeout_s + _SLACK_S
    assert len(result.text) < target.settings.max_output_chars + 5000
    assert _left_over(target) == []
    if "seccomp" in target.layers:
        assert [bad for bad in attack["bad"] if bad in result.text] == []
        assert result.error in attack.get("error", [result.error])


def _left_over(sandbox: Sandbox) -> list[psutil.Process]:
    """What lives on besides the zygote and its watcher; the kernel may need a moment to bury the rest."""
    host_side = psutil.Process(sandbox.pid)
    deadline = time.monotonic() + _SLACK_S
    while len(processes := host_side.children(recursive=True)) > 1 and time.monotonic() < deadline:
        time.sleep(0.002)
    return processes[1:]


@pytest.mark.parametrize("configuration", _CONFIGURATIONS)
def test_a_sandbox_says_which_layers_it_has_and_computes(
    sandbox_of: Callable[[str], Sandbox], configuration: str
) -> None:
    target = sandbox_of(configuration)
    assert not _CONFIGURATIONS[configuration] & set(target.layers)
    assert target.run("6 * 7", timeout_s=_TIMEOUT_S) == ToolResult(text="42\n")


def test_own_corpus_covers_many_attacks_of_many_kinds() -> None:
    attacks = _own_attacks()
    assert len({attack["id"] for attack in attacks}) == len(attacks) >= 80
    assert len({attack["category"] for attack in attacks}) >= 80


async def test_attacks_are_held_on_the_way_of_the_agent(sandbox: Sandbox, canaries: Canaries) -> None:
    attacks = _own_attacks()
    tool = PythonCodeTool(sandbox, timeout_s=_TIMEOUT_S)
    for attack in attacks[:40]:
        result = await tool.call(canaries.place_in(attack["code"]))
        assert _VALUE not in result.text
        assert [bad for bad in attack["bad"] if bad in result.text] == []
    tool.close()
    assert canaries.touched() == []
