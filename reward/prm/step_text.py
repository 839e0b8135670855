"""A planner turn as text: the one renderer that labellers, the PRM's trainer and the PRM's reward share.

A step's text ends with its decision and never holds the decision's own result, so nothing a tool answers can
change the score of asking it. Earlier steps are rendered exactly as they were when they were proposed: the text
of step k is a prefix of the text of step k + 1, and a whole group is scored as one prefix tree. What comes from outside
stands in quotation marks, as in prompts: a page that imitates a step stays a result.

A turn of an agent of one's own is a reply, and what the agent said before it stands in quotation marks. Its context is
that of its own branch.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from envs.types import ToolResult
from rollout.agent.planner import CLOSING, OPENING, shown
from rollout.types import Trajectory, Turn

PROBLEM = "Problem: {question}\n"
DECISION = "Step {number}\nThought: {thought}\nAction: {action}\nInput: {action_input}\n"
MALFORMED = "Step {number}\nMalformed: {text}\n"
RESULT = "Result: {text}\n"
REJECTED = "Rejected: {text}\n"
HEARD = "Heard: {text}\n"
REPLY = "Step {number}\nReply: {text}\n"
GAP = "[...]\n"

RENDERER_VERSION = hashlib.sha256(
    "\x00".join((PROBLEM, DECISION, MALFORMED, RESULT, REJECTED, HEARD, REPLY, GAP, OPENING, CLOSING)).encode()
).hexdigest()
"""Stands in every PRM checkpoint; a PRM trained on another rendering is refused."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """One planner turn as text. `step` counts the planner's turns from 0, malformed ones too.

    context: what came before, oldest first, decisions and results in turn. `result` is what the decision led
    to: only hindsight may read it. `valid` is False for a malformed turn.
    """

    trajectory_id: str
    task_id: str
    step: int
    num_steps: int
    problem: str
    context: tuple[str, ...]
    decision: str
    result: str
    valid: bool

    @property
    def text(self) -> str:
        return "".join((self.problem, *self.context, self.decision))

    @property
    def is_reply(self) -> bool:
        """Of an agent of one's own."""
        return self.decision.partition("\n")[2].startswith("Reply: ")

    @property
    def digest(self) -> str:
        """Of what the PRM reads, renderer included: equal digests get equal scores."""
        return hashlib.sha256(f"{RENDERER_VERSION}\x00{self.text}".encode()).hexdigest()


def step_texts(trajectory: Trajectory) -> list[StepText]:
    """Every planner turn of a trajectory, in order."""
    turns = trajectory.planner_turns
    own = any(turn.heard is not None for turn in turns)
    texts = _replies(turns) if own else _decisions(turns)
    return [
        StepText(
            trajectory_id=trajectory.id,
            task_id=trajectory.task.id,
            step=index,
            num_steps=len(turns),
            problem=PROBLEM.format(question=trajectory.task.question),
            context=context,
            decision=decision,
            result=result,
            valid=turn.format_error is None,
        )
        for index, (turn, (context, decision, result)) in enumerate(zip(turns, texts, strict=True))
    ]


def encode_step(step: StepText, encode: Encode, *, max_tokens: int) -> list[int] | None:
    """Token ids of a step's text, at most `max_tokens`, pieces encoded one by one so that prefixes stay prefixes.

    What does not fit is taken from the oldest context, then from the middle of the problem, never from the
    decision. None when the decision alone does not fit: it stays unscored, for it must never be cut.
    """
    problem, decision = list(encode(step.problem)), list(encode(step.decision))
    pieces = [list(encode(piece)) for piece in step.context]
    room = max_tokens - len(decision)
    if room < 0:
        return None
    if len(problem) + sum(map(len, pieces)) <= room:
        return [*problem, *(token for piece in pieces for token in piece), *decision]
    gap = list(encode(GAP))
    kept = _newest(pieces, room - len(problem) - len(gap))
    problem = _without_middle(problem, gap, room - sum(map(len, kept)) - (len(gap) if pieces else 0))
    cut = gap if pieces and len(kept) < len(pieces) else []
    return [*problem, *cut, *(token for piece in kept for token in piece), *decision][-max_tokens:]


def _newest(pieces: list[list[int]], room: int) -> list[list[int]]:
    kept: list[list[int]] = []
    for piece in reversed(pieces):
        room -= len(piece)
        if room < 0:
            break
        kept.insert(0, piece)
    return kept


def _without_middle(tokens: list[int], gap: list[int], room: int) -> list[int]:
    if len(tokens) <= room:
        return tokens
    kept = max(room - len(gap), 0)
    head = kept // 2
    return [*tokens[:head], *gap, *tokens[len(tokens) - (kept - head) :]] if kept else []


Texts = tuple[tuple[str, ...], str, str]
"""Context, decision and result."""


def _decisions(turns: Sequence[Turn]) -> Iterator[Texts]:
    context: tuple[str, ...] = ()
    for index, turn in enumerate(turns):
        decision, result = _decision(index, turn), _result(turn)
        yield context, decision, result
        context += (decision, result)


def _replies(turns: Sequence[Turn]) -> list[Texts]:
    """Of an agent of one's own. A reply's result is what it was told first after it."""
    texts: list[Texts] = []
    for index, turn in enumerate(turns):
        heard = HEARD.format(text=shown(ToolResult(text=turn.heard or "", foreign=True)))
        before: tuple[str, ...] = ()
        parent = _parent(turns, index)
        if parent is not None:
            context, reply, result = texts[parent]
            before = (*context, reply)
            texts[parent] = context, reply, result or heard
        texts.append(((*before, heard), REPLY.format(number=index + 1, text=turn.text), ""))
    return texts


def _parent(turns: Sequence[Turn], index: int) -> int | None:
    """The turn that this one goes on from: the one with the longest dialogue that its prompt begins with."""
    prompt = turns[index].prompt
    ends = [turn.dialogue for turn in turns[:index]]
    begun = [at for at, end in enumerate(ends) if prompt.startswith(end)]
    return max(begun, key=lambda at: len(ends[at]), default=None)


def _decision(index: int, turn: Turn) -> str:
    call = turn.tool_call
    if call is None:
        return MALFORMED.format(number=index + 1, text=turn.text)
    return DECISION.format(number=index + 1, thought=turn.thought, action=call.name, action_input=call.arguments)


def _result(turn: Turn) -> str:
    if turn.tool_result is None:
        return REJECTED.format(text=turn.format_error or "")
    return RESULT.format(text=shown(turn.tool_result))
