"""Shared sandboxes of each tier, and requirements on the machine."""

from collections.abc import Iterator

import pytest

from envs.sandbox import Sandbox, SandboxRefusedError, SandboxSettings


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="package", params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        running = Sandbox(SandboxSettings(tier=request.param))
    except SandboxRefusedError as error:
        pytest.skip(str(error))
    with running:
        yield running


@pytest.fixture(scope="package")
def namespaces() -> None:
    """Skip the test on a machine without the tier `namespaces`."""
    try:
        Sandbox(SandboxSettings(tier="namespaces")).close()
    except SandboxRefusedError as error:
        pytest.skip(str(error))
