"""One running sandbox for the tests that do not need their own."""

from collections.abc import Iterator

import pytest

from envs.sandbox import Sandbox


@pytest.fixture(scope="package")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as running:
        yield running
