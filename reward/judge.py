"""A step judge: a language model that grades planner decisions by a rubric, in votes that are paid once."""

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from weakref import WeakValueDictionary

from configs.judge import JudgeConfig
from reward.labels import LabelError, StepLabel
from reward.openai_chat import Bill, BudgetExceededError, ChatClient, ChatError, Message
from reward.receipts import Paid, Receipts, VerdictKey, View
from reward.step_text import StepText
from reward.verdict import RUBRIC, Verdict

BLIND = "<step>\n{text}</step>\nGrade the last step by what could be known when it was decided."
HINDSIGHT = "<step>\n{text}</step>\n<result>\n{result}</result>\nGrade the last step in the light of what it led to."
PROMPT_SHA = hashlib.sha256("\x00".join((RUBRIC, BLIND, HINDSIGHT)).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEstimate:
    """What labelling may still cost at most, if every first reply holds a verdict. Dollars are US dollars."""

    calls: int
    input_tokens: int
    output_tokens: int
    cost_usd: float


class StepJudge:
    """Labels a step by `num_votes` blind verdicts and one in hindsight.

    What `receipts` holds is never asked again, and its cost counts against the budget.
    """

    def __init__(self, config: JudgeConfig, *, receipts: Path, client: ChatClient | None = None) -> None:
        self.name = f"judge:{config.model}"
        self._config = config
        self._client = client or ChatClient(config, section="label.judge")
        self._receipts = Receipts(receipts)
        self.meter = self._client.meter
        self.meter.charge(self._receipts.spent)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def label(self, step: StepText) -> StepLabel:
        """Judge one step.

        Raises LabelError when this step gets no verdict or its votes disagree. BudgetExceededError, and a
        ChatError that would meet every other step too (a refused key), are not about this step: they should
        stop the whole run.
        """
        # Steps with equal texts share verdicts; together they would both pay for them.
        lock = self._locks.setdefault(step.digest, asyncio.Lock())
        async with lock:
            questions = self._questions(step)
            outcomes = await asyncio.gather(*(self._ask(*question) for question in questions), return_exceptions=True)
        # Only after all are done: what was asked is paid, and its reply must reach the receipts.
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            raise min(failures, key=lambda failure: isinstance(failure, LabelError))
        return self._label(step, [outcome for outcome in outcomes if not isinstance(outcome, BaseException)])

    def estimate(self, steps: Iterable[StepText]) -> CostEstimate:
        """What labelling these steps may cost beyond the receipts. Sends nothing."""
        asked = {key: messages for step in steps for key, messages in self._questions(step)}
        bounds = [self.meter.bound(asked[key]) for key in asked if self._receipts.get(key) is None]
        total = asdict(sum(bounds, start=Bill()))
        return CostEstimate(calls=total.pop("requests"), **total)

    async def close(self) -> None:
        await self._client.close()

    def _questions(self, step: StepText) -> list[tuple[VerdictKey, list[Message]]]:
        """The blind votes, then the question in hindsight."""
        blind = [self._question(step, "blind", vote) for vote in range(self._config.num_votes)]
        return [*blind, self._question(step, "hindsight", 0)]

    def _question(self, step: StepText, view: View, vote: int) -> tuple[VerdictKey, list[Message]]:
        messages = _messages(step, view)
        sha = hashlib.sha256(json.dumps([messages, self._config.temperature]).encode()).hexdigest()
        return VerdictKey(step.digest, view, vote, sha, self._config.model), messages

    async def _ask(self, key: VerdictKey, messages: list[Message]) -> Paid:
        replies = self._config.max_retries + 1
        for _ in range(replies):
            paid = self._receipts.get(key) or await self._buy(key, messages)
            if paid is not None:
                return paid
        raise LabelError(f"{self.name} gave no verdict in {replies} replies; read them in {self._receipts.path}")

    async def _buy(self, key: VerdictKey, messages: list[Message]) -> Paid | None:
        """One reply, written down; None when it holds no verdict."""
        try:
            reply = await self._client.complete(messages)
        except (ChatError, BudgetExceededError) as error:
            if error.bill.cost_usd:
                self._receipts.add(key, "", error.bill)
            if isinstance(error, ChatError) and (error.retryable or error.about_request):
                raise LabelError(str(error)) from error
            raise
        self._receipts.add(key, reply.text, reply.bill)
        return self._receipts.get(key)

    def _label(self, step: StepText, paid: Sequence[Paid]) -> StepLabel:
        *blind, hindsight = (verdict for verdict, _ in paid)
        votes = tuple(verdict.score for verdict in blind)
        # Rounded: 0.7 - 0.3 and 0.9 - 0.5 are the same disagreement.
        spread = round(max(votes) - min(votes), 9)
        if spread > self._config.max_spread:
            raise LabelError(
                f"{self.name} disagrees with itself about trajectory {step.trajectory_id}, step {step.step}: "
                f"votes {votes} are {spread} apart, at most label.judge.max_spread = {self._config.max_spread}"
            )
        return StepLabel.of(
            step,
            labeller=self.name,
            score=median(votes),
            score_hindsight=hindsight.score,
            votes=votes,
            spread=spread,
            details=self._details(blind, hindsight, sum((bill for _, bill in paid), start=Bill())),
        )

    def _details(self, blind: list[Verdict], hindsight: Verdict, bill: Bill) -> dict[str, Any]:
        return {
            "model": self._config.model,
            "temperature": self._config.temperature,
            "prompt_sha": PROMPT_SHA,
            "blind": [asdict(verdict) for verdict in blind],
            "hindsight": asdict(hindsight),
            **asdict(bill),
        }


def _messages(step: StepText, view: View) -> list[Message]:
    question = BLIND if view == "blind" else HINDSIGHT
    content = question.format(text=_as_data(step.text), result=_as_data(step.result))
    return [{"role": "system", "content": RUBRIC}, {"role": "user", "content": content}]


def _as_data(text: str) -> str:
    """Without the sign that opens every delimiter: ours, and those of the models' own chat templates."""
    return text.replace("<", "‹").encode(errors="replace").decode()
