import hashlib
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import make_learner, save_tiny_model

from configs.errors import UserError
from learner.checkpoint import newest_checkpoint, save_checkpoint
from learner.types import Adapter


class FakeLearner:
    """What a checkpoint asks of a learner, without a model."""

    writes = True

    def __init__(self, version):
        self.optimizer, self.num_steps_done = self, version

    def state_dict(self):
        return {}

    def adapter(self):
        data = f"adapter {self.num_steps_done}".encode()
        return Adapter(policy_version=self.num_steps_done, data=data, digest=hashlib.sha256(data).hexdigest())


def test_damaged_checkpoint_is_passed_over(tmp_path):
    for step in (1, 2):
        save_checkpoint(FakeLearner(step), tmp_path, keep=2)
    (tmp_path / "v000002" / "manifest.json").write_text("[]")
    for set_aside in (False, True):
        checkpoint, faults = newest_checkpoint(tmp_path, set_aside=set_aside)
        assert (checkpoint.folder.name, checkpoint.step, len(faults)) == ("v000001", 1, 1)
    assert not (tmp_path / "v000002").exists()


@settings(max_examples=25, deadline=None)
@given(
    start=st.sampled_from([0, 8, 999_997]),
    keep=st.integers(1, 3),
    others=st.sets(st.from_regex(r"v[0-9]{0,7}[a-z_.~ -][a-z0-9]{0,3}", fullmatch=True), max_size=4),
)
def test_folders_beside_the_checkpoints_are_never_newest_and_never_deleted(start, keep, others):
    """Copies of a checkpoint and folders that look like one, such as vbest, v000002-best and a damaged v8888888."""
    with TemporaryDirectory() as place:
        parent = Path(place)
        first = save_checkpoint(FakeLearner(start), parent, keep=keep)
        for other in others:
            shutil.copytree(first, parent / other)
        (parent / "v9999999").touch()
        (parent / "v8888888").mkdir()
        for version in range(start + 1, start + 5):
            save_checkpoint(FakeLearner(version), parent, keep=keep)
            assert newest_checkpoint(parent)[0].step == version
        kept = {f"v{version:06d}" for version in range(start + 5 - keep, start + 5)}
        assert {path.name for path in parent.iterdir()} == kept | others | {"v9999999", "v8888888"}


CHANGES = {
    "renamed": lambda state: {name.replace("base_model.", "other."): one for name, one in state.items()},
    "a reference's": lambda state: {name.replace(".weight", ".default.weight"): one for name, one in state.items()},
    "shorter": lambda state: dict([*state.items()][1:]),
    "longer": lambda state: state | {"base_model.model.lm_head.lora_A.weight": next(iter(state.values()))},
    "another rank": lambda state: {name: one[:1] if "lora_A" in name else one[:, :1] for name, one in state.items()},
    "none": lambda state: {},
}


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    return make_learner(save_tiny_model(tmp_path_factory.mktemp("model"), "llama"))


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_adapter_with_other_tensors_is_refused_and_changes_nothing(learner, change):
    before = learner.adapter()
    data = safetensors.torch.save(
        {name: tensor.contiguous() + 1 for name, tensor in change(safetensors.torch.load(before.data)).items()}
    )
    with pytest.raises(UserError):
        learner.load_adapter(Adapter(policy_version=7, data=data, digest=""))
    assert learner.adapter() == before
