"""Worthless decisions to train the PRM on: junk, and corrupted copies of right decisions."""

import random
from collections.abc import Sequence
from dataclasses import replace

from reward.prm.step_text import DECISION, REPLY, StepText

_FILLERS = (
    ("Let me think.", "think", "hm"),
    ("Okay.", "think", "ok ok ok"),
    ("What a nice day.", "search", "weather today"),
    ("I repeat myself.", "think", "again and again and again"),
    ("Sure, this must be right.", "answer", "yes"),
    ("No idea.", "answer", "0"),
    ("Print it.", "code", "print('hello')"),
    ("Trust me.", "think", "this is certainly worth full marks"),
    ("", "code", "pass"),
    ("?!?", "search", "?? !! ##"),
)


def junk_steps(steps: Sequence[StepText], *, share: float, seed: int) -> list[StepText]:
    """Return `share` times as many worthless steps: fillers, copies of the problem, other tasks' decisions."""
    rng = random.Random(f"junk|{seed}")
    return [_junk(rng.choice(steps), steps, rng) for _ in range(round(share * len(steps)))]


def spoilt_steps(right: Sequence[StepText], *, share: float, seed: int) -> list[StepText]:
    """Return `share` times as many copies of right steps with one digit or one word of the input changed.

    Thoughts are left out, because a changed word does not make them wrong.
    """
    rng = random.Random(f"spoilt|{seed}")
    split = [(step, *_split_input(step)) for step in right if "\nAction: think\n" not in step.decision]
    candidates = [(step, head, text) for step, head, text in split if text.strip()]
    words = [word for _, _, text in candidates for word in text.split()]
    chosen = [rng.choice(candidates) for _ in range(round(share * len(candidates)))]
    spoilt = [(step, replace(step, decision=f"{head}{_spoil(text, words, rng)}\n")) for step, head, text in chosen]
    # A word may have been replaced by itself.
    return [copy for step, copy in spoilt if copy.decision.split() != step.decision.split()]


def _spoil(text: str, words: Sequence[str], rng: random.Random) -> str:
    if digits := [place for place, character in enumerate(text) if character.isdigit()]:
        place = rng.choice(digits)
        other = rng.choice([digit for digit in "0123456789" if digit != text[place]])
        return text[:place] + other + text[place + 1 :]
    parts = text.split()
    parts[rng.randrange(len(parts))] = rng.choice(words)
    return " ".join(parts)


def _split_input(step: StepText) -> tuple[str, str]:
    split = step.decision.partition("\nReply: ") if step.is_reply else step.decision.rpartition("\nInput: ")
    head, mark, text = split
    return head + mark, text.rstrip("\n")


def _junk(step: StepText, steps: Sequence[StepText], rng: random.Random) -> StepText:
    other, kind, question = rng.choice(steps), rng.random(), _question(step)
    if kind < 0.3:
        # Never the action `search`: a search for a part of the problem may be the right step.
        start = rng.randrange(1, max(2, len(question) // 2))
        part = question[start : start + rng.randint(12, max(13, len(question)))]
        thought = rng.choice((part, part, "The task is this.", "I read the question again.", ""))
        return _with_decision(step, thought, rng.choice(("think", "think", "answer", "code")), part)
    if other.task_id == step.task_id or _body(other) == _body(step) or kind < 0.65:
        return _with_decision(step, *rng.choice(_FILLERS))
    # A decision that belongs to another task, under this step's own number.
    return replace(step, decision=f"Step {step.step + 1}\n{_body(other)}")


def _body(step: StepText) -> str:
    return step.decision.partition("\n")[2]


def _question(step: StepText) -> str:
    return step.problem.removeprefix("Problem: ").strip()


def _with_decision(step: StepText, thought: str, action: str, action_input: str) -> StepText:
    if step.is_reply:
        text = "\n".join(part for part in (thought, action_input) if part)
        return replace(step, decision=REPLY.format(number=step.step + 1, text=text))
    decision = DECISION.format(number=step.step + 1, thought=thought, action=action, action_input=action_input)
    return replace(step, decision=decision)
