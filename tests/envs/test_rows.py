"""Rows of files as people have them, and when two questions are the same."""

import contextlib
import gzip

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.datasets.rows import local_rows, question_key

# Files as people have them

ROW = '{"question": "q", "answer": "a"}'
DEEP = "[" * 200 + "]" * 200
LATE = pyarrow.table({"question": ["a", "b"], "when": pyarrow.array([0, 2**60], pyarrow.timestamp("ms"))})


def parquet(table):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, compression="none")
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", f'{ROW}\n{{"question": {DEEP}}}', "line 2"),
        ("a.jsonl", f'{ROW}\r\n{{"question": {"[" * 100_000}', "line 2"),
        ("a.jsonl", f"{ROW}\n".encode() + b'{"question": "\xff"}', "line 2"),
        ("a.jsonl", f"[\n{ROW}\n]", "line 1"),
        ("a.json", '{\n"question": "q"\n}', "line 1"),
        ("a.jsonl", "9" * 5000, "line 1"),
        ("a.jsonl", "null", "line 1"),
        ("a.jsonl.gz", gzip.compress(ROW.encode()), "line 1"),
        ("a.csv", "question,answer\nq,a\nq,a,b\n", "line 3"),
        ("a.csv", 'question,answer\n"q,a\n', "line 2"),
        ("a.csv", f"question,answer\nq,{'a' * 200_000}\n", "line 2"),
        ("a.csv", b"question,answer\nq,\xff\n", "line 2"),
        ("a.parquet", parquet(LATE), "row 2"),
        ("a.parquet", b"PAR1", ""),
        ("a.parquet", b"", ""),
    ],
    ids=range(15),
)
def test_unreadable_file_is_an_error_with_its_name_and_the_row(tmp_path, name, content, place):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"{name}.*{place}"):
        local_rows(path)


@given(place=st.integers(0, 2000), bit=st.integers(0, 7))
def test_flipped_parquet_is_read_or_refused_with_its_name(tmp_path_factory, place, bit):
    path = tmp_path_factory.getbasetemp() / "flipped.parquet"
    content = bytearray(parquet(pyarrow.table({"question": ["q", "é"] * 9, "answer": [["a"], None] * 9})))
    content[place % len(content)] ^= 1 << bit
    path.write_bytes(content)
    with contextlib.suppress(ValueError):
        local_rows(path)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_byte_order_mark_and_line_ends_change_no_row(tmp_path, mark, end):
    jsonl, table = tmp_path / "a.jsonl", tmp_path / "a.csv"
    jsonl.write_text(f'{mark}{{"question": "Où?", "answer": "1"}}{end}{end}', encoding="utf-8", newline="")
    table.write_text(f"{mark}question,answer,split{end}Où?,1,{end}", encoding="utf-8", newline="")
    assert local_rows(jsonl) == local_rows(table) == [{"question": "Où?", "answer": "1"}]
    for path in (jsonl, table):
        path.write_bytes(b"")
        assert local_rows(path) == []


# When two questions are the same

DIFFERENT = """
5 5! .5 5% 5² 52 √5 |5| £5 €5 ⌊5⌋ ⌈5⌉ 5₂ 5½ 51/2 5:2 5,2 5.2 [5,2] (5,2) [5,2) x≤5 x≥5 x y' y'' C# C log₂8 log28
(3+4)*2 3+4*2 2*(a+b) 2*a+b A∪B A∩B दिन दीन ไม่ ไม (n+1)! (n+1) f'(2) f(2)
"""


@pytest.mark.parametrize("form", ["{}", "What is {}?", "Find {} here."])
def test_signs_with_a_meaning_make_questions_different(form):
    questions = [form.format(one) for one in DIFFERENT.split()]
    assert len({*map(question_key, questions)}) == len(questions)


def test_case_spacing_and_punctuation_make_no_difference():
    questions = ["Who is 'X'? What's 2×3 − 1, or x²: (A) É, ❤️", "who is “x”, what’s $2 * 3-1$ or x^2? A. e\u0301; ❤"]
    assert question_key(questions[0]) == question_key(questions[1])
