"""The project that `agentflow init` writes."""

import json
import shlex
from pathlib import Path

from configs.errors import UserError, listed
from configs.loading import load_run_config
from envs.datasets.custom import QUESTIONS
from envs.datasets.rows import Row, local_rows

STARTER = Path(__file__).parents[1] / "starter"


def write_project(folder: Path, data: Path | None, question: str | None, answer: str | None) -> str:
    """Write the starter, or an agent for the rows of a file, into a new folder; return what to do with it."""
    name = load_run_config(None, [f"name={json.dumps(folder.absolute().name)}"]).name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"'{folder}' already exists; name a new folder")
    if data is None and (question or answer):
        raise UserError("--question and --answer name columns of a file; name it with --data")
    names, wrote, command = {"PROJECT": name}, "agent.py, warehouse.py (tasks, reward, teacher)", "train"
    rows: list[Row] = []
    if data is not None:
        names["SCORER"], rows = question_rows(data, question, answer)
        wrote, command = f"questions.jsonl ({len(rows)} rows), agent.py", "check"
    folder.mkdir(parents=True, exist_ok=True)
    for file in (STARTER if data is None else STARTER / "questions").glob("*.*"):
        text = file.read_text()
        for placeholder, value in names.items():
            text = text.replace(placeholder, value)
        (folder / file.name).write_text(text)
    if rows:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / "questions.jsonl").write_text("".join(lines), encoding="utf-8")
    return f"wrote {folder}: {wrote}, recipe.toml\nnext: cd {shlex.quote(str(folder))} && agentflow {command}"


def question_rows(path: Path, question: str | None, answer: str | None) -> tuple[str, list[Row]]:
    """Return the scorer that compares the answers of a file, and its rows with columns of the known names.

    Raises UserError for a file that cannot be read or lacks a column.
    """
    try:
        rows = local_rows(path)
    except (OSError, ValueError) as error:
        raise UserError(f"--data: {error}") from error
    columns = list(dict.fromkeys(column for row in rows for column in row))
    asked = question or next((column for column in QUESTIONS if column in columns), QUESTIONS[0])
    answered = answer or "answer"
    for option, column in (("--question", asked), ("--answer", answered)):
        if column not in columns:
            raise UserError(f"{path} has no column '{column}', but {listed(columns)}; name another with {option}")
    taken = {*QUESTIONS, "answer", asked, answered}
    named: list[Row] = [
        # A `prompt` or `messages` may be a conversation, which `question` may not.
        {asked if asked in QUESTIONS else "question": row.get(asked), "answer": row.get(answered)}
        | {column: value for column, value in row.items() if column not in taken}
        for row in rows
    ]
    is_integer = all(str(row["answer"]).strip().removeprefix("-").isdecimal() for row in named)
    return "integer" if is_integer else "text", named
