import pytest

from reward.labels import LabelError, MonteCarloLabeller
from reward.prm.step_text import step_texts
from tests.reward.test_step_text import decided, make_trajectory, malformed

EPISODE = make_trajectory(
    decided("search", "iron bolts", "One crate of iron bolts weighs 47 kg."),
    malformed("hm"),
    decided("code", "3*47", "141"),
    decided("answer", "141", "141"),
)


def ending(answer, stop_reason="answered"):
    return make_trajectory(decided("answer", str(answer)), id="new", answer=answer, stop_reason=stop_reason)


BROKEN = ending(None, "infrastructure")


class Ends:
    """Continuations with the given ends, and a list of what was asked for."""

    def __init__(self, *ends):
        self.asked = []
        self._ends = ends

    async def __call__(self, trajectory, num_turns, count):
        self.asked.append((trajectory.id, num_turns, count))
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
async def test_the_label_is_the_share_of_continuations_that_end_right(answers, score):
    found = await label(0, Ends(*(ending(answer) for answer in answers)))
    assert found.score == pytest.approx(score)
    assert found.score_hindsight == found.score
    assert found.votes == tuple(float(answer == "141") for answer in answers)
    assert found.spread == (1.0 if 0 < score < 1 else 0.0)


@pytest.mark.parametrize("step", [0, 1, 2])
async def test_continuations_go_on_after_the_step_itself_malformed_or_not(step):
    ends = Ends(ending("141"))
    found = await label(step, ends, continuations=7)
    assert ends.asked == [("g1/0", step + 1, 7)]
    assert (found.step, found.trajectory_id, found.task_id) == (step, "g1/0", "t1")
    assert (found.labeller, found.text_digest) == ("monte_carlo", step_texts(EPISODE)[step].digest)


@pytest.mark.parametrize(
    ("changes", "score"),
    [({"answer": "141"}, 1.0), ({"answer": "140"}, 0.0), ({"answer": None, "stop_reason": "format"}, 0.0)],
)
async def test_the_last_step_is_labelled_by_its_outcome_and_nothing_is_continued(changes, score):
    ends = Ends()
    found = await label(3, ends, trajectory=make_trajectory(*EPISODE.turns, **changes))
    assert (found.score, found.votes, found.spread) == (score, (score,), 0.0)
    assert ends.asked == []


async def test_a_broken_continuation_makes_no_label():
    with pytest.raises(LabelError):
        await label(0, Ends(ending("141"), BROKEN, ending("141"), ending("141")))


async def test_a_step_that_no_continuation_repeats_gets_no_label():
    with pytest.raises(LabelError):
        await label(1, Ends())


async def test_the_last_step_of_a_broken_episode_gets_no_label():
    trajectory = make_trajectory(*EPISODE.turns, answer=None, stop_reason="infrastructure")
    with pytest.raises(LabelError):
        await label(3, Ends(), trajectory=trajectory)
