"""Text of a planner turn: the renderer that labellers, the PRM's trainer and the PRM's reward share.

A step's text ends with its decision and never contains the decision's own result. The text of step k is a prefix of the
text of step k + 1, so that a group is scored as one prefix tree. Foreign text is quoted, as in prompts: a page that
imitates a step stays a result. A turn of a custom agent is a reply after the quoted messages of its own branch.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

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
"""Part of every PRM checkpoint; a PRM that was trained on another rendering is rejected."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepText:
    """One planner turn as text."""

    trajectory_id: str
    task_id: str
    step: int
    """Number of the planner turn from 0; malformed turns count."""
    num_steps: int
    """Planner turns of the trajectory."""
    problem: str
    context: tuple[str, ...]
    """Earlier decisions and results in turn, oldest first."""
    decision: str

    @property
    def text(self) -> str:
        return "".join((self.problem, *self.context, self.decision))

    @property
    def is_reply(self) -> bool:
        """Return whether it is a turn of a custom agent."""
        return self.decision.partition("\n")[2].startswith("Reply: ")

    @property
    def digest(self) -> str:
        """Return the digest of renderer and text; equal digests get equal scores."""
        return hashlib.sha256(f"{RENDERER_VERSION}\x00{self.text}".encode()).hexdigest()


def step_texts(trajectory: Trajectory) -> list[StepText]:
    """Return every planner turn of a trajectory as text, in order."""
    turns = trajectory.planner_turns
    is_custom = any(turn.heard is not None for turn in turns)
    return [
        StepText(
            trajectory_id=trajectory.id,
            task_id=trajectory.task.id,
            step=index,
            num_steps=len(turns),
            problem=PROBLEM.format(question=trajectory.task.question),
            context=context,
            decision=decision,
        )
        for index, (context, decision) in enumerate(_replies(turns) if is_custom else _decisions(turns))
    ]


def encode_step(step: StepText, encode: Encode, *, max_tokens: int) -> list[int] | None:
    """Return at most `max_tokens` token ids of a step's text; pieces are encoded one by one so prefixes stay prefixes.

    The oldest context is cut first, then the middle of the problem. None if the decision does not fit.
    """
    problem, *pieces, decision = (list(encode(piece)) for piece in (step.problem, *step.context, step.decision))
    if len(decision) > max_tokens:
        return None
    whole = [*problem, *chain(*pieces), *decision]
    if len(whole) <= max_tokens:
        return whole
    gap = list(encode(GAP))
    room = max(max_tokens - len(decision) - len(gap), 0)
    if len(problem) > room:
        head = room // 2
        tail = len(problem) - (room - head)
        return [*problem[:head], *gap, *problem[tail:], *decision][-max_tokens:]
    room -= len(problem)
    kept: list[int] = []
    for piece in reversed(pieces):
        room -= len(piece)
        if room < 0:
            break
        kept = [*piece, *kept]
    return [*problem, *gap, *kept, *decision][-max_tokens:]


Texts = tuple[tuple[str, ...], str]
"""Context and decision."""


def _decisions(turns: Sequence[Turn]) -> Iterator[Texts]:
    context: tuple[str, ...] = ()
    for number, turn in enumerate(turns, start=1):
        decision = MALFORMED.format(number=number, text=turn.text)
        if call := turn.tool_call:
            fields = {"thought": turn.thought, "action": call.name, "action_input": call.arguments}
            decision = DECISION.format(number=number, **fields)
        yield context, decision
        rejected, result = REJECTED.format(text=turn.format_error or ""), turn.tool_result
        context += (decision, RESULT.format(text=shown(result)) if result else rejected)


def _replies(turns: Sequence[Turn]) -> list[Texts]:
    """Return the texts of a custom agent's turns."""
    texts: list[Texts] = []
    for index, turn in enumerate(turns):
        # The turn that this one continues: the longest dialogue that its prompt starts with.
        continued = [at for at in range(index) if turn.prompt.startswith(turns[at].dialogue)]
        parent = max(continued, key=lambda at: len(turns[at].dialogue), default=None)
        before = () if parent is None else (*texts[parent][0], texts[parent][1])
        heard = HEARD.format(text=shown(ToolResult(text=turn.heard or "", foreign=True)))
        texts.append(((*before, heard), REPLY.format(number=index + 1, text=turn.text)))
    return texts
