"""Which adapters vLLM holds, with a scripted vLLM."""

from types import SimpleNamespace

import pytest

from rollout.engines.adapters import NativeAdapters


class ScriptedLlm:
    def __init__(self):
        self.held = {}
        self.refuses = False

    def add_lora(self, request):
        assert (request.folder / "adapter").exists()
        if not self.refuses:
            self.held[request.lora_int_id] = request.name
        return not self.refuses

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
        lambda name, number, folder: SimpleNamespace(name=name, lora_int_id=number, folder=folder),
    )
    adapters = NativeAdapters(llm, ScriptedMerger())
    yield adapters
    adapters.close()


def folders(adapters):
    return sorted(folder.name for folder in adapters._root.iterdir())


def test_every_version_has_a_name_a_number_and_a_folder_of_its_own(llm, adapters):
    for version in (3, 4):
        adapters.load(version, "abcdef0123", b"same bytes")
    assert llm.held == {1: "v3-1-abcdef01", 2: "v4-2-abcdef01"}
    assert folders(adapters) == ["v3-1-abcdef01", "v4-2-abcdef01"]
    assert adapters.request(3).lora_int_id == 1


def test_unused_versions_are_forgotten_on_disk_too_and_used_ones_stay(llm, adapters):
    for version in range(4):
        adapters.load(version, "abcdef0123", b"")
    adapters.drop_unused({1, 3, -1})
    assert list(llm.held) == [2, 4]
    assert folders(adapters) == ["v1-2-abcdef01", "v3-4-abcdef01"]


def test_version_that_comes_again_finds_nothing_of_the_one_before(llm, adapters):
    adapters.load(0, "abcdef0123", b"")
    first = adapters.request(0)
    adapters.drop_unused(set())
    adapters.load(0, "abcdef0123", b"")
    assert adapters.request(0).lora_int_id != first.lora_int_id
    assert adapters.request(0).name != first.name


def test_only_the_base_model_needs_no_adapter(adapters):
    adapters.load(0, "abcdef0123", b"")
    adapters.drop_unused(set())
    assert adapters.request(-1) is None
    with pytest.raises(KeyError):
        adapters.request(0)


def test_adapter_that_vllm_does_not_take_is_an_error(llm, adapters):
    llm.refuses = True
    with pytest.raises(RuntimeError, match="vLLM refused adapter version 5"):
        adapters.load(5, "abcdef0123", b"")
    with pytest.raises(KeyError):
        adapters.request(5)


def test_two_engines_of_one_process_do_not_share_folders_and_leave_none(llm, adapters):
    other = NativeAdapters(ScriptedLlm(), ScriptedMerger())
    for one in (adapters, other):
        one.load(0, "abcdef0123", b"")
    assert adapters.request(0).folder != other.request(0).folder
    other.close()
    assert not other._root.exists()
    assert folders(adapters) == ["v0-1-abcdef01"]
