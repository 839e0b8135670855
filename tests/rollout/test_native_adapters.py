"""The adapters in a scripted vLLM, and their files."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.engines.adapters import NativeAdapters


class ScriptedLlm:
    def __init__(self):
        self.held = {}

    def add_lora(self, request):
        assert (Path(request.lora_path) / "adapter").exists()
        self.held[request.lora_int_id] = request.name
        return True

    def remove_lora(self, number):
        del self.held[number]


class ScriptedMerger:
    def write_adapter_folder(self, folder, adapter):
        folder.mkdir()
        (folder / "adapter").write_bytes(adapter)


@pytest.fixture
def llm():
    return ScriptedLlm()


@pytest.fixture
def adapters(llm, monkeypatch):
    monkeypatch.setattr(
        "rollout.engines.adapters.lora_request",
        lambda name, number, folder: SimpleNamespace(name=name, lora_int_id=number, lora_path=folder),
    )
    adapters = NativeAdapters(llm, ScriptedMerger())
    yield adapters
    adapters.close()


def load(adapters, version, adapter):
    adapters.load(version, adapters.write(version, "abcdef0123", adapter))


def folders(adapters):
    return sorted(folder.name for folder in adapters._files.path.iterdir())


def test_every_version_has_a_name_a_number_and_a_folder_of_its_own_until_it_is_unused(llm, adapters):
    for version in range(4):
        load(adapters, version, b"same bytes")
    assert llm.held == {number + 1: f"v{number}-{number + 1}-abcdef01" for number in range(4)}
    assert (adapters.request(3).lora_int_id, adapters.request(-1)) == (4, None)
    adapters.drop_unused({1, 3, -1})
    assert list(llm.held) == [2, 4]
    assert folders(adapters) == ["v1-2-abcdef01", "v3-4-abcdef01"]
