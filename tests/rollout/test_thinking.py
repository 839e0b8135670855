import pytest

from rollout.engines.served import parse_reply

REPLY = '{"thought":"t","action":"answer","action_input":"42"}'


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        (REPLY, None, REPLY),
        (f"<think>\n\n</think>\n\n{REPLY}", "", REPLY),
        (f"\n<think>\nsix sevens\n</think>\n\n{REPLY}", "six sevens", REPLY),
        (f"six sevens\n</think>\n\n{REPLY}", "six sevens", REPLY),
        (f"</think>{REPLY}", "", REPLY),
        ("<think>\nsix sevens are", "six sevens are", ""),
        ("<think>", "", ""),
        ("", None, ""),
        ("plain words", None, "plain words"),
    ],
)
def test_a_reply_is_what_stands_after_the_thinking_even_where_a_tag_is_missing(text, thinking, answer):
    parsed = parse_reply(text)
    assert (parsed.thinking, parsed.answer) == (thinking, answer)


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<think>x</think>"])
def test_a_tag_that_a_json_string_quotes_is_text(tag):
    text = f'{{"thought":"the page says {tag}","action":"think","action_input":""}}'
    parsed = parse_reply(text)
    assert (parsed.thinking, parsed.answer) == (None, text)
