"""The commands that README and docs show: each block of them says, in a comment right before it, how it is tested.

    <!-- runs: quick -->     executed as it stands, in a folder of its own, at every test run
    <!-- runs: slow -->      executed by `make test-faults`, all in one folder, in the order of the pages
    <!-- runs: server -->    as slow: must print its address and answer there, and is then stopped
    <!-- needs: gpu -->      parsed, its recipe and settings loaded, but not executed: see NEEDS

After a `;` may follow `with: ARGUMENTS`, added to each of its commands so that it takes seconds instead of minutes,
`by: PAGE`, whose slow block has the same commands, and `prints: TEXT`, which a slow block must then say.
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
NEEDS = ("gpu", "cluster", "key", "ollama", "network", "suite")
"""What a block that is not executed would need; `suite`: it is the tests themselves."""

_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- ((?:runs|needs|file): [^\n]*) -->\n\Z")
_COMMAND = re.compile(r"^\s*(?:\$ )?(?:\w+=\S+ )*(?:nohup )?(agentflow|make) ", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block; `marks` are what its comment says, by their name."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def shows_commands(self) -> bool:
        """The docstring of a program may name one, too."""
        return self.language in SHELLS or (self.language != "python" and _COMMAND.search(self.text) is not None)

    @property
    def commands(self) -> list[str]:
        """The command lines, continued ones as one, without comments and without a console's output."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]

    @property
    def script(self) -> str:
        """What is executed: `make` only says what it would do, but for slow blocks."""
        added = self.marks.get("with", "")
        return "\n".join(self._executed(line, added) for line in self.commands)

    def _executed(self, line: str, added: str) -> str:
        command, hash_sign, comment = line.partition(" #")
        if re.search(r"\b(agentflow|make) ", command):
            command = f"{command.rstrip()} {added}"
        if self.marks.get("runs") == "quick":
            command = re.sub(r"^make\b", "make -n", command)
        return f"{command}{hash_sign}{comment}".rstrip()


def blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text[: found.start()].count("\n") + 1,
            language=found[2],
            text=found[3],
            marks=_marks(text[: found.start()]),
        )
        for found in _FENCE.finditer(text)
    ]


def _marks(before: str) -> dict[str, str]:
    comment = _COMMENT.search(before)
    parts = comment[1].split("; ") if comment else []
    return dict(part.split(": ", 1) for part in parts)


def files_of(page: Path) -> dict[str, str]:
    """The files that a page shows, by name."""
    return {block.marks["file"]: block.text for block in blocks_of(page) if "file" in block.marks}


def words_of(command: str) -> list[str]:
    """As a shell would split it, without its comment and what it is piped into."""
    words = shlex.split(command, comments=True)
    end = next((index for index, word in enumerate(words) if word in ("|", ">", ">>", "&", "&&")), len(words))
    return words[:end]


def fill(folder: Path, page: Path) -> None:
    """What a page's commands find: the project's own folders and files, and those the page shows."""
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", "site", ".git", ".venv") and not (folder / entry.name).exists():
            (folder / entry.name).symlink_to(entry)
    for name, text in files_of(page).items():
        (folder / name).write_text(text, encoding="utf-8")


def environment() -> dict[str, str]:
    """With the commands of the virtual environment that the tests run in, as after its activation."""
    bin_folder = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "VENV": str(Path(sys.executable).parents[1])}
