import html
import math
import re
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.util.tensor_util import make_ndarray

from configs.loading import load_run_config
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.metrics import BY_NAME
from ray_jobs.run.tensorboard import HISTOGRAMS, TEXTS, Board, StepDistributions, StepTexts, markdown_of, plain
from rollout.records import RecordLine, exact_line

HOSTILE = (
    "<script>alert(1)</script> ![x](http://evil.test/a.png) [y](javascript:alert(2)) <http://evil.test> **b** | c | "
    "`d`\n# e\n\n```\nf\n```\n<img src=x onerror=alert(3)>\n&lt;i&gt; \u202eright to left\x1b[31m \\<b>"
)


def make_turn(*, text="w", action="search", **changes):
    turn = {
        "role": "planner",
        "thought": "think",
        "action": action,
        "action_input": text,
        "result": "found",
        "tool_error": None,
        "format_error": None,
        "text": text,
        "policy_version": 2,
        "switches": [],
        "generate_s": 1.5,
        "tool_s": 0.25,
        "trainable": True,
        "token_ids": [1, 2, 3, 4],
        "logprobs": [-1.0, -1.0, -1.0, -1.0],
        "learner_logprobs": [-1.0, -1.0, None, -1.0 + math.log(2)],
    }
    return turn | changes


def make_record(*turns, outcome=1.0, group="g0", **changes):
    record = {
        "id": f"{group}/0",
        "group_id": group,
        "phase": "train",
        "step": 1,
        "verdict": "trained",
        "question": "how many?",
        "gold": "42",
        "answer": "42",
        "stop_reason": "answered",
        "reward": outcome,
        "outcome": outcome,
        "advantages": [0.5] * len(turns),
        "prm_scores": [0.25] * len(turns),
        "turns": list(turns),
    }
    return record | changes


def make_folder(tmp_path):
    return RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r"]))


def open_board(folder):
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def histogram(events, name):
    """(step, `[K, 3]`) of each."""
    return [(event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(name)]


def text(events, name):
    return [(event.step, make_ndarray(event.tensor_proto).item().decode()) for event in events.Tensors(name)]


AGES = {1: 2, 2: 1, 3: 0}
"""Those of the versions while version 3 is updated."""


def as_written(record):
    return RecordLine.of(exact_line(record))


def watched(*records, version_ages=AGES):
    looking = StepDistributions(version_ages, len(records))
    for record in records:
        if looking.wants(record):
            looking.add(record)
    return looking.histograms()


def test_every_scalar_says_in_one_line_what_it_is(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_metrics(1, {"rollout/solve_rate": 0.5, "own/number": 1.0})
        folder.log_metrics(2, {"rollout/solve_rate": 0.75})
    events = open_board(folder.path)
    said = events.SummaryMetadata("rollout/solve_rate")
    assert said.display_name == "solve rate"
    assert said.summary_description.startswith("Mean score of all groups' scored trajectories")
    assert [event.value for event in events.Scalars("rollout/solve_rate")] == [0.5, 0.75]
    assert [event.value for event in events.Scalars("own/number")] == [1.0]


def test_charts_that_answer_one_question_stand_together(tmp_path):
    Board(tmp_path / "tb").close()
    (event,) = open_board(tmp_path).Tensors("custom_scalars__config__")
    layout = Layout.FromString(make_ndarray(event.tensor_proto).item())
    first = layout.category[0]
    assert first.title == "Is it learning?"
    assert (first.chart[0].title, list(first.chart[0].multiline.tag)) == ("Solved", ["^rollout/solve_rate$"])
    # TensorBoard draws all lines of a chart in the colour of their run.
    assert list(first.chart[1].multiline.tag) == ["^rollout/groups_kept_share$"]
    (held_out,) = first.chart[2].margin.series
    assert (held_out.value, held_out.lower, held_out.upper) == ("held_out/solve_rate", "held_out/low", "held_out/high")


def test_the_first_tag_of_all_is_the_solve_rate(tmp_path):
    """TensorBoard lists tags by their characters."""
    board = Board(tmp_path / "tb")
    board.add_scalars(1, dict.fromkeys(BY_NAME, 0.25) | {"rollout/solve_rate": 0.75})
    board.close()
    events = open_board(tmp_path)
    solved = min(events.Tags()["scalars"])
    assert solved == "Is it learning?/solved"
    assert [event.value for event in events.Scalars(solved)] == [0.75]
    assert events.SummaryMetadata(solved).summary_description.startswith("Mean score")


def test_histograms_count_steps_trajectories_and_tokens():
    found = watched(
        make_record(make_turn(), make_turn(action=None, policy_version=1, switches=[[1, 2]]), advantages=[1.0, -1.0]),
        make_record(make_turn(), outcome=0.0, prm_scores=[None]),
    )
    counts = {name: buckets[:, 2].sum() for name, buckets in found.items()}
    assert counts == {
        "steps/advantage": 3,
        "steps/prm_score": 2,
        "steps/tokens": 3,
        "steps/generate_s": 3,
        "steps/tool_s": 2,
        "trajectories/steps": 2,
        "tokens/staleness": 12,
        "tokens/ratio": 9,
    }
    # Eleven tokens of version 2 and one of version 1, before a learner of version 3.
    assert found["tokens/staleness"].tolist() == [[0.5, 1.5, 11.0], [1.5, 2.5, 1.0]]
    # A ratio of exp(0) at two tokens of each turn, of exp(log 2) at one.
    ratios = found["tokens/ratio"]
    assert (ratios[0, 0], ratios[-1, 1]) == (1.0, pytest.approx(2.0))
    assert (ratios[0, 2], ratios[-1, 2]) == (6, 3)


def test_what_was_not_trained_is_in_no_histogram():
    assert watched(make_record(make_turn(), verdict="all_wrong")) == {}


def test_numbers_that_are_none_are_left_out():
    found = watched(make_record(make_turn(), make_turn(), advantages=[math.nan, 1.0], prm_scores=[math.inf, None]))
    assert found["steps/advantage"].tolist() == [[0.5, 1.5, 1.0]]
    assert "steps/prm_score" not in found


def test_of_a_large_step_a_part_is_counted_from_its_first_to_its_last():
    """600 trajectories: every third one, 200 of them."""
    records = [make_record(make_turn(), outcome=float(number)) for number in range(600)]
    looking = StepDistributions(AGES, len(records))
    assert [record["outcome"] for record in records if looking.wants(record)] == list(range(0, 600, 3))


def test_histograms_and_texts_read_back_with_their_counts_and_descriptions(tmp_path):
    with make_folder(tmp_path) as folder:
        right, wrong = make_record(make_turn()), make_record(make_turn(), make_turn(), outcome=0.0)
        folder.log_step(7, map(as_written, [right, wrong]), version_ages=AGES)
        folder.catch_up()
        assert (folder.path / "trajectories.jsonl").read_text().count("\n") == 2
    events = open_board(folder.path)
    assert set(events.Tags()["tensors"]) - {"custom_scalars__config__"} == set(HISTOGRAMS) | set(TEXTS)
    ((step, buckets),) = histogram(events, "steps/tokens")
    assert (step, buckets.tolist()) == (7, [[3.5, 4.5, 3.0]])
    assert events.SummaryMetadata("steps/tokens").summary_description == "Sampled tokens of each planner step."
    ((step, shown),) = text(events, "trajectories/wrong")
    assert step == 7
    assert "reward 0.00" in shown


def test_the_right_and_the_wrong_trajectory_are_siblings():
    looking = StepTexts()
    records = [
        make_record(make_turn(), outcome=None),
        make_record(make_turn(), group="g1", answer="first"),
        make_record(make_turn(), group="g1", answer="second"),
        make_record(make_turn(), group="g2", outcome=0.0),
        make_record(make_turn(), group="g1", outcome=0.0, answer="third"),
    ]
    for record in records:
        if looking.wants(record):
            looking.add(record)
    assert {name: re.search(r"Answer\*\* (\w+)", shown)[1] for name, shown in looking.texts().items()} == {
        "trajectories/right": "first",
        "trajectories/wrong": "third",
    }


@pytest.mark.parametrize(
    "place", ["question", "gold", "answer", "thought", "text", "result", "tool_error", "malformed"]
)
def test_hostile_text_is_shown_as_text_and_changes_nothing_around_it(place):
    """In the page that TensorBoard makes of it the tags are those that a harmless text would have."""

    def page_of(said):
        match place:
            case "question" | "gold" | "answer":
                record = make_record(make_turn(), **{place: said})
            case "malformed":
                record = make_record(make_turn(action=None, format_error=said, text=said))
            case "text":
                record = make_record(make_turn(text=said, action=said))
            case _:
                record = make_record(make_turn(**{place: said}))
        return markdown_to_safe_html(markdown_of(record))

    def tags_of(page):
        return [tag for tag in re.findall(r"</?\w+[^>]*>", page) if tag != "<br>"]

    hostile = page_of(HOSTILE)
    assert tags_of(hostile) == tags_of(page_of("harmless"))
    assert "<a" not in hostile
    assert "<img" not in hostile
    seen = html.unescape(re.sub(r"<[^>]*>", "", hostile))
    assert "<script>alert(1)</script> ![x](http://evil.test/a.png)" in seen
    assert "[U+202E]right to left[U+001B]" in seen


def test_text_in_any_script_stays_readable_and_long_text_is_cut():
    assert plain("Äpfel 苹果 7") == "Äpfel 苹果 7"
    assert len(plain("a" * 1_000_000)) < 700
    assert plain("a" * 1_000_000).endswith("&#40;1000000 characters&#41;")


def test_a_megabyte_of_text_costs_little_time():
    started = time.process_time()
    markdown_of(make_record(*[make_turn(text="<b>" * 400_000, result="|" * 1_000_000)] * 60))
    assert time.process_time() - started < 2


def test_nothing_stands_twice_after_a_rewind_and_what_stays_keeps_its_time(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_metrics(0, {"cold_start/loss": 2.0})
        folder.finish_phase("cold_start", 1.0, {})
        folder.log_metrics(0, {"train_prm/loss": 1.0})
        for step in (1, 2, 3):
            folder.log_metrics(step, {"policy/loss": float(step)})
            folder.log_step(step, [as_written(make_record(make_turn()))], version_ages=AGES)
        folder.catch_up()
        before = open_board(folder.path)
        kept = folder.rewind(2)
        folder.log_metrics(3, {"policy/loss": 30.0})
        folder.log_step(3, [as_written(make_record(make_turn(), make_turn()))], version_ages=AGES)
    assert [row["step"] for row in kept] == [1, 2]
    events = open_board(folder.path)
    assert [(one.step, one.value) for one in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [one.wall_time for one in events.Scalars("policy/loss")][:2] == [
        one.wall_time for one in before.Scalars("policy/loss")
    ][:2]
    assert [(step, buckets[0, 2]) for step, buckets in histogram(events, "trajectories/steps")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
    ]
    assert [step for step, _ in text(events, "trajectories/right")] == [1, 2, 3]
    assert len(events.Scalars("cold_start/loss")) == 1
    # Its phase had not ended: it is trained anew.
    assert "train_prm/loss" not in events.Tags()["scalars"]
    assert events.SummaryMetadata("policy/loss").summary_description
    assert len(events.Tensors("custom_scalars__config__")) == 1


def test_a_rewind_that_a_crash_cut_off_leaves_nothing_double_after_the_next(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_metrics(1, {"policy/loss": 1.0})
        (written,) = (folder.path / "tb").iterdir()
        (folder.path / "tb" / f"{written.name}.copy").write_bytes(written.read_bytes())
        folder.rewind(1)
    assert [one.value for one in open_board(folder.path).Scalars("policy/loss")] == [1.0]


def test_a_last_event_that_a_crash_cut_off_is_dropped(tmp_path):
    with make_folder(tmp_path) as folder:
        folder.log_metrics(1, {"policy/loss": 1.0})
        folder.log_metrics(2, {"policy/loss": 2.0})
        (written,) = (folder.path / "tb").iterdir()
        written.write_bytes(written.read_bytes()[:-7])
        folder.rewind(2)
    assert [one.step for one in open_board(folder.path).Scalars("policy/loss")] == [1]


def test_seconds_go_on_after_a_resume(tmp_path):
    with make_folder(tmp_path) as folder:
        (folder.path / "metrics.jsonl").write_text('{"step": 1, "wall_s": 100.0, "policy/loss": 0.5}\n')
        folder.rewind(1)
        folder.log_metrics(2, {"policy/loss": 0.25})
        rows = folder.rewind(2)
    assert rows[0]["wall_s"] == 100.0
    assert 100.0 <= rows[1]["wall_s"] < 110.0


def test_histogram_of_equal_numbers_has_one_bucket_around_them():
    (bucket,) = watched(make_record(make_turn(generate_s=2.0)))["steps/generate_s"]
    np.testing.assert_array_equal(bucket, [1.5, 2.5, 1.0])


def test_steps_that_were_not_trained_are_in_no_histogram():
    """Regression: what a fork repeats, and attempts that could not be scored, were so many advantages of 0."""
    replayed, trained = make_turn(trainable=False), make_turn()
    whole = watched(make_record(replayed, trained, advantages=[0.0, 0.75], prm_scores=[0.125, 0.25]))
    alone = watched(make_record(trained, advantages=[0.75]))
    assert whole["trajectories/steps"].tolist() == [[1.5, 2.5, 1.0]]
    for name in ("advantage", "prm_score", "tokens", "generate_s", "tool_s"):
        assert whole[f"steps/{name}"].tolist() == alone[f"steps/{name}"].tolist()
    assert watched(make_record(trained, outcome=None, advantages=[0.0])) == {}


def test_tokens_that_were_not_trained_have_neither_a_ratio_nor_an_age():
    """Regression: what a fork repeats had an age, and made trained tokens look older than they are."""
    replayed, trained = make_turn(trainable=False), make_turn()
    del replayed["learner_logprobs"]
    assert not {"tokens/staleness", "tokens/ratio"} & watched(make_record(replayed)).keys()
    alone, beside = watched(make_record(trained)), watched(make_record(replayed, trained))
    assert alone["tokens/staleness"].tolist() == beside["tokens/staleness"].tolist()
