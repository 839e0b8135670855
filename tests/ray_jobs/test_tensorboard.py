import html
import math
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.util.tensor_util import make_ndarray

from configs.loading import load_run_config
from envs.types import Task, ToolCall, ToolResult
from ray_jobs.run.folder import RunFolder
from ray_jobs.run.trackers import HISTOGRAMS, TEXTS, StepDistributions, markdown_of
from rollout.types import Completion, Reward, Trajectory, Turn, VersionSwitch, packed_floats
from tests.changed import replace

HOSTILE = (
    "<script>alert(1)</script> ![x](http://evil.test/a.png) [y](javascript:alert(2)) <http://evil.test> **b** | c | "
    "`d`\n# e\n\n```\nf\n```\n<img src=x onerror=alert(3)>\n&lt;i&gt; \u202eright to left\x1b[31m \\<b>"
)


def make_turn(*, text="w", action="search", result="found", tool_error=None, policy_version=2, switches=(), **changes):
    turn = Turn.of(
        role="planner",
        prompt_token_ids=(),
        completion=Completion(
            token_ids=(1, 2, 3, 4),
            logprobs=(-1.0,) * 4,
            text=text,
            finish_reason="stop",
            policy_version=policy_version,
            switches=tuple(VersionSwitch(index=index, policy_version=version) for index, version in switches),
        ),
        trainable=True,
        thought="think",
        tool_call=None if action is None else ToolCall(name=action, arguments=text),
        tool_result=ToolResult(text=result, error=tool_error),
        generate_s=1.5,
        tool_s=0.25,
        learner_logprobs=packed_floats([-1.0, -1.0, math.nan, -1.0 + math.log(2)]),
    )
    return replace(turn, **changes)


def make_record(
    *turns, outcome=1.0, group="g0", advantages=None, prm_scores=None, question="how many?", gold="42", **changes
):
    values = zip(turns, advantages or [0.5] * len(turns), prm_scores or [0.25] * len(turns), strict=True)
    facts = {"answer": "42", "stop_reason": "answered", "step": 1, "verdict": "trained"}
    return Trajectory(
        id=f"{group}/0",
        group_id=group,
        task=Task(id="t", dataset="d", question=question, answer=gold),
        turns=tuple(replace(turn, advantage=advantage, score=score) for turn, advantage, score in values),
        reward=Reward(outcome=outcome, total=outcome),
        **(facts | changes),
    )


def make_folder(tmp_path):
    return RunFolder.open(load_run_config(None, [f"output_dir={tmp_path}", "name=r"]))


def open_board(folder, name="tb"):
    events = EventAccumulator(str(folder / name), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    events.Reload()
    return events


def text(events, name):
    tensors = events.Tensors(f"{name}/text_summary")
    return [(event.step, make_ndarray(event.tensor_proto).item().decode()) for event in tensors]


AGES = {1: 2, 2: 1, 3: 0}
"""Those of the versions while version 3 is updated."""


def watched(*records, version_ages=AGES):
    looking = StepDistributions(version_ages, len(records))
    for record in records:
        looking.add(record)
    return looking.histograms()


def test_histograms_count_steps_trajectories_and_tokens():
    values = watched(
        make_record(make_turn(), make_turn(action=None, policy_version=1, switches=[[1, 2]]), advantages=[1.0, -1.0]),
        make_record(make_turn(), outcome=0.0, prm_scores=[None]),
    )
    assert {name: numbers.size for name, numbers in values.items()} == {
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
    assert sorted(values["tokens/staleness"]) == [1.0] * 11 + [2.0]
    # A ratio of exp(0) at two tokens of each turn, of exp(log 2) at one.
    assert sorted(values["tokens/ratio"]) == pytest.approx([1.0] * 6 + [2.0] * 3)


def test_scalars_histograms_and_texts_can_be_read_back(tmp_path):
    with make_folder(tmp_path) as folder:
        right, wrong = make_record(make_turn()), make_record(make_turn(), make_turn(), outcome=0.0)
        folder.log_metrics(7, {"rollout/solve_rate": 0.5, "custom/number": 1.0})
        folder.log_step(7, [right, wrong], version_ages=AGES)
        folder.catch_up()
        assert (folder.path / "trajectories.jsonl").read_text().count("\n") == 2
    events = open_board(folder.path)
    assert [(event.step, event.value) for event in events.Scalars("rollout/solve_rate")] == [(7, 0.5)]
    assert [event.value for event in events.Scalars("custom/number")] == [1.0]
    assert set(events.Tags()["histograms"]) == set(HISTOGRAMS)
    assert set(events.Tags()["tensors"]) == {f"{name}/text_summary" for name in TEXTS}
    (tokens,) = events.Histograms("steps/tokens")
    assert (tokens.step, tokens.histogram_value.num, tokens.histogram_value.sum) == (7, 3.0, 12.0)
    ((step, shown),) = text(events, "trajectories/wrong")
    assert step == 7
    assert "reward 0.00" in shown


@pytest.mark.parametrize(
    "place", ["question", "gold", "answer", "thought", "text", "result", "tool_error", "malformed"]
)
def test_hostile_text_adds_no_markup(place):
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


def test_rewind_hides_later_steps_and_unfinished_phases(tmp_path):
    with make_folder(tmp_path) as folder:
        for step in range(5):
            folder.log_metrics(step, {"cold_start/loss": 2.0})
        folder.finish_phase("cold_start", 1.0, {})
        folder.log_metrics(0, {"train_prm/loss": 1.0})
        for step in (1, 2, 3):
            folder.log_metrics(step, {"policy/loss": float(step)})
            folder.log_step(step, [make_record(make_turn())], version_ages=AGES)
    with RunFolder.open(
        load_run_config(None, [f"output_dir={tmp_path}", "name=r"]), with_prm=False, tell=str
    ) as folder:
        assert [row["step"] for row in folder.rewind(2)] == [1, 2]
        folder.log_metrics(0, {"train_prm/loss": 3.0})
        folder.log_metrics(3, {"policy/loss": 30.0})
        folder.log_step(3, [make_record(make_turn(), make_turn())], version_ages=AGES)
    events = open_board(folder.path)
    assert [(one.step, one.value) for one in events.Scalars("policy/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    steps = [(one.step, one.histogram_value.sum) for one in events.Histograms("trajectories/steps")]
    assert steps == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert len(open_board(folder.path, "tb/cold_start").Scalars("cold_start/loss")) == 5
    assert [one.value for one in open_board(folder.path, "tb/train_prm").Scalars("train_prm/loss")] == [3.0]
