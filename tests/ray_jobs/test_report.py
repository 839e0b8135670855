import json
import math
import re

import pytest

from configs.loading import load_run_config
from envs.sandbox import SandboxState
from ray_jobs.run.folder import RunFolder
from ray_jobs.viewer.render import TEMPLATES
from ray_jobs.viewer.report import write_report

EVIL = """'"><script>alert(1)</script><b onclick=x>{{ 7 * 7 }}"""
METRICS = {
    "policy/loss": 0.02,
    "rollout/solve_rate": 0.107,
    "rollout/groups_kept_share": 0.5,
    "learner/step_s": 1.0,
    "learner/wait_s": 2.0,
    "policy/staleness_max": 3.0,
}


def make_turn(**changes):
    turn = {
        "role": "planner",
        "thought": "Look it up.",
        "action": "search",
        "action_input": "clay keys",
        "result": "37 kg",
        "tool_error": None,
        "format_error": None,
        "text": "raw",
    }
    return turn | changes


def make_record(phase, reward, **changes):
    record = {
        "phase": phase,
        "task_id": "t1",
        "question": "How heavy?",
        "gold": "42",
        "answer": "41",
        "stop_reason": "answered",
        "reward": reward,
        "turns": [make_turn()],
    }
    return record | changes


def make_summary(**changes):
    summary = {
        "verdict": "+70.0 points, significant",
        "mcnemar_p": 1e-9,
        "seed": 5,
        "solve_rate_untouched": 0.0,
        "num_untouched_tasks": 10,
        "solve_rate_before": 0.1,
        "solve_rate_after": 0.8,
        "num_eval_tasks": 100,
        "by_dataset": {"lookup": {"num": 100, "before": 0.1, "after": 0.8}},
        "cold_start": {"num_demonstrations": 104, "num_right": 31},
        "phases": {"reinforce": 12.5},
    }
    return summary | changes


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(load_run_config(None, [f"output_dir={tmp_path}", "name=r"])) as folder:
        yield folder


def render(folder):
    return write_report(folder.path).read_text(encoding="utf-8")


def words_of(page):
    """What a person reads, without the markup."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.partition("</style>")[2]))


def test_report_states_the_verdict_and_shows_a_task_before_and_after(folder):
    folder.log_metrics(1, METRICS)
    folder.log_metrics(2, METRICS)
    folder.log_trajectories([make_record("eval_before", 0.0), make_record("eval_after", 1.0, answer="42")])
    folder.write_summary(make_summary())
    words = words_of(render(folder))
    assert "Yes. On 100 held-out tasks: 10.0% solved before RL, 80.0% after RL. +70.0 points" in words
    assert "10 of these tasks" in words
    assert "The same task after RL" in words
    assert "1 tasks from wrong to right and 0 from right to wrong; 0 are wrong after it" in words
    assert "Look it up. search clay keys → 37 kg Answer: 42 , the reference is 42" in words.replace("&rarr;", "→")


def test_footer_says_what_stood_around_the_planners_code(tmp_path):
    state = SandboxState(tier="landlock", layers=("rlimits", "landlock"), without="namespaces: <forbidden>")
    config = load_run_config(None, [f"output_dir={tmp_path}", "name=walled"])
    with RunFolder.create(config, sandbox=state) as folder:
        said = "code sandbox: tier landlock (rlimits, landlock); without namespaces: &lt;forbidden&gt;"
        assert said in render(folder)
    recorded = json.loads((tmp_path / "walled" / "provenance.json").read_text())["sandbox"]
    assert recorded == {"tier": "landlock", "layers": ["rlimits", "landlock"], "without": "namespaces: <forbidden>"}


def test_report_has_one_big_number_then_one_curve_then_the_caveats(folder):
    folder.log_metrics(1, METRICS)
    folder.log_metrics(2, METRICS)
    folder.write_summary(make_summary(num_steps=2))
    page = render(folder)
    assert re.findall(r'class="hero">([^<]*)<', page) == ["+70.0 points"]
    curve = page.index("<figcaption>Tasks solved")
    assert page.index('class="hero"') < curve < page.index("Read it with this in mind") < page.index("<section")
    (first, *_) = re.findall(r"<figure>.*?</figure>", page, flags=re.DOTALL)
    assert re.findall(r'class="mark (\w+)"', first) == ["before", "after"]
    assert "held out, after RL: 80.0%" in first


def test_contents_lead_to_every_section(folder):
    folder.log_metrics(1, METRICS)
    folder.write_summary(make_summary(prm={"mse": 0.1}))
    page = render(folder)
    links = re.findall(r'href="#([^"]*)"', page)
    assert len(links) == 5
    assert links == re.findall(r'<section id="([^"]*)"', page)


def test_families_have_a_chart_where_there_are_several(folder):
    folder.log_metrics(1, METRICS | {"mix/lookup": 0.25, "mix/chain": 0.75, "mix/branch": 0.0})
    (figure,) = (one for one in re.findall(r"<figure>.*?</figure>", render(folder), flags=re.DOTALL) if "chain" in one)
    assert re.findall(r"<title>(\w+)</title>", figure) == ["lookup", "chain", "branch"]


def test_family_without_a_value_at_some_step_shortens_no_other_line(folder):
    for step, mix in ((1, {"mix/lookup": 1.0}), (2, {"mix/lookup": 1.0}), (3, {"mix/lookup": 0.75, "mix/chain": 0.25})):
        folder.log_metrics(step, METRICS | mix)
    (figure,) = (one for one in re.findall(r"<figure>.*?</figure>", render(folder), flags=re.DOTALL) if "chain" in one)
    assert [figure.count(f'class="dot s{line}"') for line in (0, 1)] == [3, 1]


def test_a_single_family_has_no_chart(folder):
    folder.log_metrics(1, METRICS | {"mix/lookup": 1.0})
    assert "Groups by the family" not in render(folder)


def test_every_chart_has_its_title_and_whole_steps_below(folder):
    for step in range(1, 38):
        folder.log_metrics(step, METRICS)
    folder.write_summary(make_summary(num_steps=37))
    figures = re.findall(r"<figure>.*?</figure>", render(folder), flags=re.DOTALL)
    assert len(figures) == 4
    for figure in figures:
        assert re.search(r"<figcaption>\w", figure)
        below = re.findall(r'text-anchor="middle">(?:step )?(\d+)<', figure)
        assert below in (["0", *map(str, range(5, 38, 5))], [*map(str, range(5, 38, 5))])


def held_out_row(step, **rates):
    """An evaluation while training; every interval is from 0.1 to 0.9."""
    names = {"": 0.5, **{f"/{name}": rate for name, rate in rates.items()}}
    ends = {f"held_out/{end}{name}": value for name in names for end, value in (("low", 0.1), ("high", 0.9))}
    return {"step": step, **{f"held_out/solve_rate{name}": rate for name, rate in names.items()}, **ends}


def test_evaluations_while_training_are_a_curve_with_intervals_for_all_tasks_and_each_data_set(folder):
    for step in (5, 10):
        folder.log_metrics(step, METRICS)
        folder.log_metrics(step, held_out_row(step, lookup=0.25, branch=0.75))
    folder.write_summary(make_summary(num_steps=12))
    figures = re.findall(r"<figure>.*?</figure>", render(folder), flags=re.DOTALL)
    (whole,) = [one for one in figures if "Held-out tasks solved while training" in one]
    (families,) = [one for one in figures if "The same by data set" in one]
    # A whisker at each of two steps, and those of the diamonds before and after RL.
    assert (whole.count('class="reach s0"'), whole.count('class="reach before"')) == (2, 1)
    assert [families.count(f'class="reach s{line}"') for line in (0, 1, 2)] == [2, 2, 0]
    assert "lookup" in families
    # The chart is 220 high with edges of 14 and 30: 0.9 and 0.1 lie at 31.6 and 172.4.
    assert families.count("31.6V172.4") == 4


def test_statistics_of_the_prm_are_folded(folder):
    folder.write_summary(make_summary(prm={"mse": 0.1, "canaries": {"thanks": 0.1}}))
    page = render(folder)
    shown = re.sub(r"<details>.*?</details>", "", page.partition("</style>")[2], flags=re.DOTALL)
    assert "Junk that must score low" in page
    assert "Junk that must score low" not in shown


ALARM = {"step": 9, "name": "canary", "message": "prm/canary_max is 0.9", "prm_weight": 0.25}


def test_alarms_about_a_prm_that_another_run_trained_are_on_the_page(folder):
    folder.write_summary(make_summary(alarms=[ALARM], prm_weight_at_end=0.25))
    page = render(folder)
    words = words_of(page).replace("&#39;", "'")
    assert "The process reward model 1 alarm in training; the PRM's weight at the end was 0.25. Step 9: " in words
    assert "Step 9: prm/canary_max is 0.9." in words
    assert "Its quality on held-out tasks" not in words
    assert 'href="#the-process-reward-model"' in page
    folder.write_summary(make_summary())
    assert "the-process-reward-model" not in render(folder)


def test_alarms_about_a_scorer_of_turns_are_on_the_page_and_not_said_to_be_a_prms(tmp_path):
    overrides = [f"output_dir={tmp_path}", "name=r", "reward.credit={type='outcome_gated', turn_scorer='mine:turns'}"]
    with RunFolder.create(load_run_config(None, overrides)) as folder:
        folder.write_summary(make_summary(alarms=[ALARM], prm_weight_at_end=0.25))
        words = words_of(render(folder))
    assert "The scorer of turns 1 alarm in training; the weight of its scores at the end was 0.25." in words
    assert "PRM" not in words
    assert "process reward model" not in words.partition("How to get these numbers again")[0]


def test_handicap_of_the_cold_start_stands_beside_the_verdict(folder):
    folder.log_metrics(0, {"cold_start/loss": 1.0})
    folder.log_metrics(1, METRICS)
    folder.write_summary(make_summary())
    words = words_of(render(folder))
    assert "imitated 104 scripted demonstrations on training tasks, 73 of them (70.2%) wrong on purpose" in words
    assert "Sampled with temperature 1, the cold-started policy was right in 10.7%" in words
    assert words.index("wrong on purpose") < words.rindex("Before and after")


def test_a_teachers_wrong_demonstrations_are_not_said_to_be_wrong_on_purpose(tmp_path):
    overrides = [f"output_dir={tmp_path}", "name=r", "agent.function=mine:solve", "cold_start.function=mine:teach"]
    with RunFolder.create(load_run_config(None, [*overrides, "reward.credit=outcome"])) as folder:
        folder.write_summary(make_summary())
        words = words_of(render(folder))
    assert "imitated 104 attempts in which the teacher replied, 73 of them (70.2%) not right" in words
    assert "on purpose" not in words


def test_mean_scores_are_on_the_scale_on_which_solved_is_one(folder):
    folder.write_summary(make_summary(mean_scores={"before": 0.45, "after": 0.512}))
    said = "The mean score is 0.450 before and 0.512 after RL; solved is a score of 1."
    assert said in " ".join(render(folder).split())


def test_mean_score_in_training_is_not_told_as_a_share_of_attempts_that_were_right(folder):
    folder.log_metrics(1, METRICS)
    folder.write_summary(make_summary(mean_scores={"before": 0.45, "after": 0.512}))
    words = words_of(render(folder))
    assert "the cold-started policy scored 0.107 on average at training tasks before the first train step" in words
    assert "Line: attempts at training tasks, sampled, by their mean score. Diamonds" in words
    assert "was right in" not in words


def test_data_set_that_was_not_learned_is_named_even_where_the_whole_got_better(folder):
    table = {
        "lookup": {"num": 85, "before": 0.1, "after": 0.9},
        "two_lookup": {"num": 10, "before": 0.0, "after": 0.0},
        "game24": {"num": 5, "before": 0.8, "after": 0.4},
    }
    folder.write_summary(make_summary(by_dataset=table))
    words = words_of(render(folder))
    assert "Of the 10 two_lookup tasks, none was solved after RL" in words
    assert "On game24, fewer tasks were solved after RL than before." in words
    assert "lookup tasks, none" not in words.replace("two_lookup", "")


@pytest.mark.parametrize("answer", [None, " "])
def test_model_that_does_not_know_the_format_is_not_blamed_for_more(folder, answer):
    silent = {"answer": answer, "stop_reason": "format"}
    folder.log_trajectories(make_record("eval_untouched", 0.0, task_id=str(id), **silent) for id in range(3))
    folder.log_trajectories([make_record("eval_untouched", 0.0, task_id="3")])
    folder.write_summary(make_summary())
    words = words_of(render(folder))
    assert "3 of the untouched model's 4 attempts ended without an answer" in words.replace("&#39;", "'")
    # Tasks, right, wrong answer, no answer, unscored, failed tool calls, turns per task.
    assert "untouched model 4 0 1 3 0 0 1.0" in words


def test_answer_that_a_scorer_could_not_judge_is_not_told_as_wrong(folder):
    rewards = {"0": 1.0, "1": 0.0, "2": None}
    folder.log_trajectories(make_record("eval_after", reward, task_id=id) for id, reward in rewards.items())
    folder.write_summary(make_summary())
    # Tasks, right, wrong answer, no answer, unscored.
    assert "after RL 3 1 1 0 1 " in words_of(render(folder))


@pytest.mark.parametrize(
    ("after", "p", "answer", "kind"),
    [
        (0.8, 1e-9, "Yes.", "better"),
        (0.8, 0.05, "This run does not show it.", "unsure"),
        (0.02, 1e-9, "No, it made it worse.", "unsure worse"),
        (None, 1e-9, "That was not measured.", "unsure"),
    ],
)
def test_only_a_significant_gain_is_answered_with_yes(folder, after, p, answer, kind):
    folder.write_summary(make_summary(solve_rate_after=after, mcnemar_p=p))
    assert f'class="verdict {kind}"><b>{answer}</b>' in render(folder)


def hostile(value):
    """The value with every string in it replaced, except those that a run's own code compares."""
    if isinstance(value, dict):
        kept = ("role", "phase", "task_id", "group_id", "tier")
        return {name: one if name in kept else hostile(one) for name, one in value.items()}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return EVIL if isinstance(value, str) else value


def test_every_text_of_a_run_is_escaped_and_nothing_comes_from_outside(folder):
    turns = [make_turn(tool_error="e"), make_turn(format_error="e"), make_turn(action=None), make_turn(thought="")]
    scored = {"group_id": "g", "prm_scores": [0.1] * 4, "advantages": [0.1] * 4}
    attempts = (("eval_before", 0.0), ("eval_after", 1.0), ("eval_after", 0.0))
    records = [
        *(
            make_record(phase, reward, task_id=f"{index // 2}", turns=turns)
            for index, (phase, reward) in enumerate(attempts)
        ),
        make_record("eval_untouched", 0.0, answer=None),
        *(make_record("reinforce", reward, turns=turns, outcome=reward, **scored) for reward in (0.0, 1.0)),
    ]
    rates = {EVIL: {"num": 1, "before": 0.5, "after": 0.0, "trained": False}}
    prm = {"canaries": {EVIL: 0.1}, "best_of_n": {EVIL: {"prm": "x"}}, "auroc_by_action": {EVIL: {"auroc": 0.5}}}
    alarms, bottleneck = [{"step": 1, "message": "m"}], {"text": "t", "hint": "h"}
    summary = make_summary(by_dataset=rates, phases={EVIL: 1.0}, prm=prm, alarms=alarms, bottleneck=bottleneck)
    origin = json.loads((folder.path / "provenance.json").read_text())
    sandbox = {"tier": "landlock", "layers": ["rlimits"], "without": "w"}
    folder.log_metrics(1, METRICS)
    folder.log_trajectories(map(hostile, records))
    folder.write_summary(hostile(summary))
    (folder.path / "provenance.json").write_text(json.dumps(hostile(origin | {"sandbox": sandbox, "command": "c"})))
    (folder.path / "config.json").write_text(json.dumps({"name": EVIL, "rollout": {"temperature": EVIL}}))
    page = render(folder)
    assert "<script" not in page
    assert page.count("&lt;script&gt;alert(1)") > 40
    assert page.count("{{ 7 * 7 }}") == page.count("&lt;script&gt;")
    # No text ends the attribute or the tag that it stands in.
    assert not re.search(r"<[^>]*(alert|onclick)", page)
    assert not re.search(r"\b(?:src=|href=\"[^#])|url\(|@import", page)


def test_only_drawings_and_the_style_are_taken_as_markup():
    texts = {path.name: path.read_text() for path in TEMPLATES.iterdir()}
    assert {name: count for name, text in texts.items() if (count := text.count("safe"))} == {
        "frame.html.j2": 1,
        "parts.html.j2": 1,
    }
    assert "autoescape" not in "".join(texts.values())


def test_report_without_any_one_of_its_numbers_still_renders(folder):
    folder.log_metrics(1, METRICS)
    for key in make_summary():
        folder.write_summary({name: value for name, value in make_summary().items() if name != key})
        words = words_of(render(folder))
        assert "How to get these numbers again" in words
        if key != "seed":
            (named,) = re.findall(r"Missing from summary.json: ([^.]*)\.", words)
            assert key in named.split(", ")


def test_report_of_a_run_that_was_cut_off_before_its_end_says_nothing_of_what_rl_turned(folder):
    folder.log_trajectories([make_record("eval_before", 0.0)])
    words = words_of(render(folder))
    assert "from wrong to right" not in words
    assert "No trajectories were recorded" in words


def test_report_of_a_run_in_which_all_tasks_are_right_before_and_after_counts_them(folder):
    folder.log_trajectories([make_record("eval_before", 1.0), make_record("eval_after", 1.0)])
    words = words_of(render(folder))
    assert "RL turned 0 tasks from wrong to right and 0 from right to wrong; 0 are wrong after it." in words
    assert "No trajectories were recorded" not in words


def test_report_of_a_run_that_did_not_finish_says_so(folder, tmp_path):
    words = words_of(render(folder))
    assert "A run that did not finish" in words
    assert "Not logged: Tasks solved, over train steps" in words
    assert "No trajectories were recorded" in words
    assert "code sandbox" not in words
    (tmp_path / "empty").mkdir()
    assert "A run that did not finish" in write_report(tmp_path / "empty").read_text()


def test_untouched_model_that_was_not_measured_has_no_bar(folder):
    folder.write_summary(make_summary(solve_rate_untouched=None, num_untouched_tasks=0))
    assert 'class="bar before"' in render(folder)
    assert 'class="bar untouched"' not in render(folder)


def test_step_that_is_missing_or_not_a_number_leaves_the_charts_whole(folder):
    folder.log_metrics(1, METRICS)
    folder.log_metrics(2, {"policy/loss": 0.01, "rollout/solve_rate": math.nan, "learner/step_s": math.inf})
    folder.log_metrics(3, METRICS | {"policy/staleness_max": 9.0})
    folder.write_summary(make_summary())
    charts = "".join(re.findall(r"<svg.*?</svg>", render(folder), flags=re.DOTALL))
    assert "nan" not in charts
    assert "inf" not in charts
    # Whole labels on a grid of four rows: 9 versions need 12.
    assert re.findall(r">(\d+)</text>", charts).count("12") == 1


def test_data_set_that_was_never_trained_on_is_marked_with_its_own_test(folder):
    table = {
        "lookup": {"num": 300, "before": 0.1, "after": 0.9, "mcnemar_p": 1e-9, "trained": True},
        "branch": {"num": 100, "before": 0.1, "after": 0.12, "mcnemar_p": 0.79, "trained": False},
    }
    folder.write_summary(make_summary(by_dataset=table))
    words = words_of(render(folder))
    assert "branch (never trained on) 100 10.0% 12.0% 7.0 to 19.8% 0.79" in words
    assert "lookup 300 10.0% 90.0%" in words
    assert "On branch, which was never trained on, RL made no difference that this run shows." in words
