import pytest

from configs.errors import UserError
from reward.labels import StepLabel, append_label, read_labels


def make_label(step=0, **changes):
    values = {
        "trajectory_id": "g1/0",
        "task_id": "t1",
        "step": step,
        "labeller": "judge:one",
        "text_digest": "d" * 64,
        "score": 0.7,
        "score_hindsight": 0.2,
        "votes": (0.5, 0.9, 0.7),
        "spread": 0.4,
        "details": {"reason": "Finds it.", "criteria": {"correct": 2}},
    }
    return StepLabel(**(values | changes))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "labels.jsonl"


@pytest.mark.parametrize(
    "label",
    [
        make_label(),
        make_label(score_hindsight=None, votes=(), spread=0.0, details={}),
        make_label(score=0.0, details={"reason": 'a "quote",\na newline, \u2028 and 苹果'}),
        make_label(score=1 / 3),
    ],
    ids=["whole", "without hindsight", "any text", "no short number"],
)
def test_a_label_comes_back_as_it_was(path, label):
    append_label(path, label)
    assert list(read_labels(path)) == [label]


def test_a_label_that_a_crash_cut_off_never_becomes_part_of_the_next(path):
    append_label(path, make_label(0))
    append_label(path, make_label(1))
    path.write_bytes(path.read_bytes()[:-10])
    append_label(path, make_label(2))
    assert list(read_labels(path)) == [make_label(0), make_label(2)]
    assert path.read_bytes().count(b"\n") == 2


def test_labels_of_another_schema_are_refused(path):
    append_label(path, make_label())
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 0'))
    with pytest.raises(UserError, match=r"labels\.jsonl"):
        list(read_labels(path))
