import json
from pathlib import Path

import pytest

from rollout.agent.planner import Decision, FormatError, parse_decision, planner_grammar

GOLDEN = Path(__file__).parents[1] / "golden" / "values.json"


def test_golden_texts_are_judged_as_stated():
    for case in json.loads(GOLDEN.read_text())["planner_format"]:
        if case["valid"] is True:
            parse_decision(case["text"])
        elif case["valid"] is False:
            with pytest.raises(FormatError):
                parse_decision(case["text"])


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{204}",
        r"\frac{1}{2} \times \nu \neq \theta",
        'print("a\\n")\nfor i in range(3):\n\tprint(i)',
        'quote " backslash \\ slash / tab \t',
        "ünïcode ∑ 中文",
    ],
)
def test_latex_and_code_survive_the_json_round_trip(text):
    decision = Decision(thought=text, action="code", action_input=text)
    assert parse_decision(decision.to_json()) == decision


def test_grammar_accepts_every_decision_and_no_escape_that_eats_latex():
    xgrammar = pytest.importorskip("xgrammar")
    grammar = xgrammar.Grammar.from_ebnf(planner_grammar(("code", "answer")))
    accepts = xgrammar.testing._is_grammar_accept_string
    good = Decision(thought="", action="code", action_input='x = "\\boxed"\nprint(x)\t#/ ü')
    assert accepts(grammar, good.to_json())
    assert not accepts(grammar, '{"thought":"","action":"search","action_input":"x"}')
    assert not accepts(grammar, r'{"thought":"","action":"code","action_input":"\boxed"}')
    assert not accepts(grammar, r'{"thought":"","action":"code","action_input":"\ud800"}')
    assert not accepts(grammar, '{"thought":"", "action":"code","action_input":"x"}')
