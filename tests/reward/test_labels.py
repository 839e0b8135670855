import pytest

from configs.errors import UserError
from reward.labels import LabelError, MonteCarloLabeller, StepLabel, append_label, read_labels
from reward.prm.step_text import step_texts
from tests.reward.test_step_text import decided, make_trajectory, malformed

LABEL = StepLabel(
    trajectory_id="g1/0",
    task_id="t1",
    step=0,
    labeller="judge:one",
    text_digest="d" * 64,
    score=1 / 3,
    votes=(0.5, 0.9, 0.7),
    details={"reason": 'a "quote",\na newline, \u2028 and 苹果', "criteria": {"correct": 2}},
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "labels.jsonl"


def test_labels_are_read_as_written(path):
    for _ in range(2):
        append_label(path, LABEL)
    assert list(read_labels(path)) == [LABEL, LABEL]


def test_labels_of_another_schema_are_rejected(path):
    append_label(path, LABEL)
    path.write_text(path.read_text().replace('"score"', '"mark"'))
    with pytest.raises(UserError, match=r"labels\.jsonl"):
        list(read_labels(path))


# Monte Carlo.

EPISODE = make_trajectory(
    decided("search", "iron bolts", "One crate of iron bolts weighs 47 kg."),
    malformed("hm"),
    decided("code", "3*47", "141"),
    decided("answer", "141", "141"),
)


def ending(answer, stop_reason="answered", *, repeated=1):
    turns = *EPISODE.turns[:repeated], decided("answer", str(answer))
    return make_trajectory(*turns, id="new", answer=answer, stop_reason=stop_reason)


class Ends:
    """A sampler of scripted continuations that records its requests."""

    def __init__(self, *ends):
        self.requests = []
        self._ends = ends

    async def __call__(self, trajectory, num_turns, count):
        self.requests.append((trajectory.id, num_turns, count))
        return self._ends


async def label(step, ends, *, trajectory=EPISODE, continuations=4):
    labeller = MonteCarloLabeller([trajectory], ends, continuations=continuations)
    return await labeller.label(step_texts(trajectory)[step])


@pytest.mark.parametrize(
    ("answers", "score"),
    [
        (("141", "141", "140", "141"), 0.75),
        (("140", "0", "1", "2"), 0.0),
        (("141", "141", "141", "141"), 1.0),
        (("141", None, None, None), 0.25),
        (("140", "141", None), 1 / 3),
    ],
)
async def test_the_label_is_the_share_of_continuations_after_the_step_that_end_right(answers, score):
    for step in range(3):
        ends = Ends(*(ending(answer, repeated=step + 1) for answer in answers))
        labelled = await label(step, ends, continuations=7)
        assert labelled.score == pytest.approx(score)
        assert labelled.votes == tuple(float(answer == "141") for answer in answers)
        # One new reply of one token each.
        assert labelled.details == {"num_tokens": len(answers)}
        assert ends.requests == [("g1/0", step + 1, 7)]
        assert (labelled.step, labelled.trajectory_id, labelled.task_id) == (step, "g1/0", "t1")
        assert (labelled.labeller, labelled.text_digest) == ("monte_carlo", step_texts(EPISODE)[step].digest)


@pytest.mark.parametrize(
    ("changes", "score"),
    [({"answer": "141"}, 1.0), ({"answer": "140"}, 0.0), ({"answer": None, "stop_reason": "format"}, 0.0)],
)
async def test_the_last_step_is_labelled_by_its_outcome_and_nothing_is_continued(changes, score):
    ends = Ends()
    labelled = await label(3, ends, trajectory=make_trajectory(*EPISODE.turns, **changes))
    assert (labelled.score, labelled.votes) == (score, (score,))
    assert ends.requests == []


async def test_failed_or_missing_continuations_give_no_label():
    failed = make_trajectory(*EPISODE.turns, answer=None, stop_reason="infrastructure")
    for step, ends, trajectory in (
        (0, Ends(ending("141"), ending(None, "infrastructure")), EPISODE),
        (1, Ends(), EPISODE),
        (3, Ends(), failed),
    ):
        with pytest.raises(LabelError):
            await label(step, ends, trajectory=trajectory)
