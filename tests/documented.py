"""The commands that README and docs show. Each block of them has a comment before it that says how it is tested:

    <!-- runs: quick -->     `agentflow` commands, executed at every test run, in their own folder
    <!-- runs: slow -->      executed by `make test-faults`, all in one folder, in the order of the pages
    <!-- runs: server -->    like slow: must print its address and answer there, and is then stopped
    <!-- needs: gpu -->      parsed, and its recipe and settings loaded, but not executed: see NEEDS

After a `;` may follow `with: ARGUMENTS`, added to each of its commands so that it takes seconds instead of minutes,
`by: PAGE`, whose slow block has the same commands, and `prints: TEXT`, which the output must contain.
`<!-- file: NAME -->` before another block makes a file of it, which the page's commands find in their folder.
"""

import os
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
SHELLS = ("bash", "console")
RUNS = ("quick", "slow", "server")
NEEDS = ("gpu", "cluster", "ollama", "network", "suite")

_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- ((?:runs|needs|file): [^\n]*) -->\n\Z")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block and the marks of its comment."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The command lines, with continued lines joined and without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]

    @property
    def script(self) -> str:
        """The script that a test executes."""
        lines = []
        for line in self.commands:
            command, hash_sign, comment = line.partition(" #")
            if re.search(r"\b(agentflow|make) ", command):
                command = f"{command.rstrip()} {self.marks.get('with', '')}"
            lines.append(f"{command}{hash_sign}{comment}".rstrip())
        return "\n".join(lines)


def blocks_of(page: Path) -> list[Block]:
    text, blocks = page.read_text(encoding="utf-8"), []
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        comment = _COMMENT.search(before)
        marks = dict(part.split(": ", 1) for part in comment[1].split("; ")) if comment else {}
        blocks.append(Block(page=page, line=before.count("\n") + 1, language=found[2], text=found[3], marks=marks))
    return blocks


SHOWN = [block for page in PAGES for block in blocks_of(page) if block.language in SHELLS]


def words_of(command: str) -> list[str]:
    """Split like a shell, without comment and pipe."""
    words = shlex.split(command, comments=True)
    end = next((index for index, word in enumerate(words) if word in ("|", ">", ">>", "&", "&&")), len(words))
    return words[:end]


def fill(folder: Path, page: Path) -> None:
    """Link the project's folders into `folder`, and write the files that the page shows."""
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", "site", ".git", ".venv") and not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    for block in blocks_of(page):
        if "file" in block.marks:
            (folder / block.marks["file"]).write_text(block.text, encoding="utf-8")


def environment() -> dict[str, str]:
    """Return the environment with the commands of the tests' virtual environment."""
    bin_folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "VENV": str(Path(sys.executable).parents[1])}
