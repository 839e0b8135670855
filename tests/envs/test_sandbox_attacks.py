"""The attack corpus: no attack reads, changes or reaches the host, or leaves a process."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import psutil
import pytest
from attacks import (
    SECRET,
    SLACK_S,
    Attack,
    Canaries,
    all_attacks,
    left_over,
    placed_canaries,
    signs_of_escape,
)

from envs.sandbox import Sandbox, SandboxRefusedError, SandboxSettings

_TIMEOUT_S, _HANG_TIMEOUT_S = 2.0, 0.3
# Every configuration of layers must keep the host whole. Without seccomp the code may make calls that end
# in its own cell, so there only the canaries count.
_CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "all-layers": (),
    "without-landlock": ("landlock",),
    "without-seccomp": ("seccomp",),
}


@pytest.fixture(scope="module")
def canaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Canaries]:
    with placed_canaries(tmp_path_factory.mktemp("canary")) as placed:
        yield placed


@pytest.fixture(scope="module")
def sandbox_of(canaries: Canaries) -> Iterator[Callable[[str], Sandbox]]:
    """The running sandbox of each configuration, started at first use."""
    with ExitStack() as stack:

        @cache
        def start(configuration: str) -> Sandbox:
            disabled = _CONFIGURATIONS[configuration]
            settings = SandboxSettings(tier="namespaces", check_imports=False, disabled_layers=disabled)
            try:
                return stack.enter_context(Sandbox(settings))
            except SandboxRefusedError as error:
                pytest.skip(str(error))

        yield start


def _corpus() -> list[Any]:
    """Return all attacks by configuration; an attack that hangs runs once, because layers make no difference."""
    return [
        pytest.param(name, attack, id=f"{name}-{attack['id']}-{attack['category']}")
        for name, disabled in _CONFIGURATIONS.items()
        for attack in all_attacks()
        if not (disabled and attack.get("hangs"))
    ]


@pytest.mark.parametrize(("configuration", "attack"), _corpus())
def test_attack_is_held(
    sandbox_of: Callable[[str], Sandbox], canaries: Canaries, configuration: str, attack: Attack
) -> None:
    target = sandbox_of(configuration)
    code = canaries.place_in(attack["code"])
    timeout_s = _HANG_TIMEOUT_S if attack.get("hangs") else attack.get("timeout_s", _TIMEOUT_S)
    for _ in range(attack.get("repeat", 1)):
        start = time.monotonic()
        result = target.run(code, timeout_s=timeout_s)
        elapsed_s = time.monotonic() - start
    assert canaries.touched() == []
    assert SECRET not in result.text
    assert elapsed_s < timeout_s + SLACK_S
    assert len(result.text) < target.settings.max_output_chars + 5000
    assert left_over(psutil.Process(target.pid)) == []
    if "seccomp" in target.state.layers:
        assert signs_of_escape(attack, result.text, result.error) == []
