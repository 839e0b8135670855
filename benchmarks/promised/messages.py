"""What a user meets: errors of one line that name what was meant, and prompts that hold each message once."""

import io
import multiprocessing
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from benchmarks.promised.promise import Measured, Promise
from configs.loading import RECIPES
from configs.run import RunConfig
from configs.wording import setting_names
from ray_jobs.cli import main, make_app
from rollout.chat import ChatFormat, ChatTemplateError
from tests.rollout.chat_templates import NO_ROLE, ROLES, tokenizer_of

FILES = {
    "notes.txt": b"no recipe",
    "binary": b"\xff\xfe\x00",
    "broken.toml": b"a = = 1",
    "broken.json": b"{",
    "half.jsonl": b'{"question": "1 + 1?"}\n',
    "run/config.json": b"{}",
    "cut/config.json": b"{",
    "checkpoint/manifest.json": b"{}",
    "evaluation/evaluation.json": b'{"schema": 0}',
    "my_tools.py": b"def plain(text): ...\n\n\nclass Sync:\n    name = description = 'sync'\n"
    b"    def call(self, text): ...\n",
}
ANSWER = """'envs.actions=["answer"]' cold_start.num_demonstrations=0"""
"""Of a recipe whose tools take no time to open, and whose plans would call others."""
LIGHT = f"""
trian
train --dryrun
train nothing.toml
train broken.toml
train broken.json
train binary
train .
train notes.txt/recipe.toml
train seed=x
train learner.lerning_rate=1
train rollout.group_size=1
train envs.tools.x.source=nonsense
train envs.mix={{lokup=1}}
train --dry-run envs.mix={{lokup=1}}
train {ANSWER} output_dir=notes.txt/runs
train {ANSWER} name=run output_dir=.
train {ANSWER} model.path=run
train {ANSWER} reward.credit.prm_path=run
train {ANSWER} envs.data_path=nothing
train {ANSWER} envs.mix={{own_text=1}} envs.data_path=half.jsonl cold_start.num_demonstrations=0
train {ANSWER} envs.mix={{own_text=1}} envs.data_path=binary cold_start.num_demonstrations=0
train 'envs.actions=["plain","answer"]' envs.tools.plain.source=my_tools:plain
train 'envs.actions=["sync","answer"]' envs.tools.sync.source=my_tools:Sync
train 'envs.actions=["x","answer"]' envs.tools.x.source=rollout.mine:X
train 'envs.actions=["code","answer"]' envs.recording.path=run envs.recording.mode=record \
    envs.tools.x.source=nothing:X
train label.type=judge
resume nothing
resume notes.txt
resume run
resume cut
chaos --kills -1
evaluate --seeds x
evaluate --backend nonsense:x
plan --card potato
plan model.path=some/model
plan --model-config notes.txt
simulate --steps x
simulate --run nothing
simulate --depth 4 --cap 2
solve q --recipe nothing
solve q {ANSWER} --backend openai:x backend.base_url=nonsense
solve q {ANSWER} --backend openai:x backend.base_url=http://127.0.0.1:1 backend.max_retries=0
run-code nothing.py
run-code run
run-code binary
run-code notes.txt --timeout -1
serve-tools --transport x
evaluate {ANSWER} --adapter nothing
collect {ANSWER} output_dir=notes.txt/runs
compare nothing
solve q {ANSWER} --adapter notes.txt
export nothing --to out
export run --to out --quantize nonsense
serve nothing
serve notes.txt
view nothing
view run --port 99999
"""
"""Commands that end before torch is imported."""
HEAVY = f"""
evaluate {ANSWER} --adapter checkpoint
evaluate {ANSWER} --benchmark bambogle
evaluate {ANSWER} --benchmark gaia --data run
evaluate {ANSWER} --out notes.txt/out --limit 1
compare evaluation evaluation
label
train-prm
jobs --address http://127.0.0.1:1
submit demo_cpu --address nonsense
"""


def one_line_errors(seed: int) -> Measured:
    """Every command of the tables, and misspelt words: one line on stderr, exit code 2, nothing on stdout or disk."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        light = fresh.submit(_bad_commands, LIGHT, seed).result()
    heavy = _bad_commands(HEAVY, seed)
    broken, count = light.broken + heavy.broken, light.count + heavy.count
    text = f"{count - len(broken)} of {count} bad commands end with one line and code 2"
    faults = [*broken[:1], *light.left, *heavy.left, *(["torch was imported"] if light.torch else [])]
    return Measured("; ".join([text, *faults]), not faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`left` are files that a refused command made, `torch` whether it was imported."""

    count: int
    broken: tuple[str, ...]
    left: tuple[str, ...]
    torch: bool


def _bad_commands(table: str, seed: int) -> Outcome:
    """In a folder of their own and in drawn order, with misspelt words among them."""
    rng = random.Random(seed)
    commands = [(shlex.split(line), "") for line in table.replace("\\\n", " ").splitlines() if line] + _misspelt(rng)
    rng.shuffle(commands)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name, content in FILES.items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_bytes(content)
        broken = [shlex.join(arguments) for arguments, meant in commands if not _is_one_line(arguments, meant)]
        left = sorted(set(os.listdir()) - {name.partition("/")[0] for name in FILES} - {"__pycache__"})
    return Outcome(count=len(commands), broken=tuple(broken), left=tuple(left), torch="torch" in sys.modules)


def _is_one_line(arguments: Sequence[str], meant: str) -> bool:
    said, out = io.StringIO(), io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(out):
            code: object = main(arguments)
    except SystemExit as end:
        code = end.code
    except Exception:
        return False
    lines = said.getvalue().splitlines()
    plain = len(lines) == 1 and lines[0].startswith("agentflow: error: ") and "Errno" not in lines[0]
    # Only a dry run prints before it refuses: the configuration.
    quiet = not out.getvalue() or "--dry-run" in arguments
    return code == 2 and plain and quiet and meant in lines[0]


def _misspelt(rng: random.Random) -> list[tuple[list[str], str]]:
    """Commands, settings and recipes with a letter left out, and what has to be asked then."""
    found = []
    for word in rng.sample(sorted(name for name in make_app() if not name.startswith("-")), 5):
        found.append(([_without_a_letter(word, rng)], f"did you mean '{word}'?"))
    for name in rng.sample(sorted(name for name in setting_names(RunConfig) if "NAME" not in name), 20):
        table, dot, leaf = name.rpartition(".")
        found.append((["train", f"{table}{dot}{_without_a_letter(leaf, rng)}=1"], f"did you mean '{name}'?"))
    recipe = rng.choice(sorted(path.stem for path in RECIPES.glob("*.toml")))
    return [*found, (["train", _without_a_letter(recipe, rng)], f"did you mean '{recipe}'?")]


def _without_a_letter(word: str, rng: random.Random) -> str:
    """Of letters that are not first: who mistypes a word begins it right."""
    place = rng.randrange(1, len(word))
    return word[:place] + word[place + 1 :]


def chat_templates(seed: int) -> Measured:
    """Dialogues of drawn words and lengths: as text, every message once and in order, whatever the template."""
    rng = random.Random(seed)
    right, templates = [], ROLES | NO_ROLE
    for name, template in templates.items():
        tokenizer = tokenizer_of(template)
        said = [_words(rng) for _ in range(2 * rng.randint(2, 5))]
        chat = ChatFormat(tokenizer)
        ids = chat.prompt(said[0], said[1])
        for reply, text in zip(said[2::2], said[3::2], strict=True):
            sampled = chat.encode_completion(reply)
            ids += sampled + chat.bridge(sampled, text)
        shown = tokenizer.decode(ids)
        places = [shown.find(one) for one in said]
        once = all(shown.count(one) == 1 for one in said)
        right.append(name if once and places == sorted(places) and "\x01" not in shown else None)
    refused = []
    for template in (None, "{{ messages[0].content }}", "{{ raise_exception('no') }}"):
        try:
            ChatFormat(tokenizer_of(template))
        except ChatTemplateError:
            refused.append(template)
    holds = None not in right and len(refused) == 3
    return Measured(
        f"{len(right) - right.count(None)} of {len(templates)} templates, {len(refused)} of 3 refused", holds
    )


def _words(rng: random.Random) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=8)) for _ in range(rng.randint(2, 12)))


PROMISES = (
    Promise(
        name="one-line-errors",
        said="What a user can mend is one line and exit code 2, and a mistyped word is told the nearest one",
        where="docs/commands.md",
        measure=one_line_errors,
    ),
    Promise(
        name="chat-templates",
        said="Whatever the model's chat template, a prompt holds each message once; one that cannot is refused",
        where="docs/troubleshooting.md",
        measure=chat_templates,
    ),
)
