"""Chat completions over HTTP, in the protocol that DeepSeek, vLLM and Ollama share, within a budget."""

import asyncio
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

from configs.errors import UserError, whole_letters
from configs.reward import JudgeConfig
from envs.http import HttpError, RefusedError, Sleep, UnreachableError, chat_advice, chat_completion, chat_service

CHARS_PER_TOKEN = 4

Message = dict[str, str]

_ABOUT_THIS_REQUEST = (400, 413, 422)


@dataclass(frozen=True, slots=True)
class Bill:
    """What requests used: their number, tokens and US dollars."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(*map(add, astuple(self), astuple(other)))


NO_BILL = Bill()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A completion. `bill` covers every attempt it took; one whose reply was lost counts at its bound."""

    text: str
    bill: Bill


class ChatError(UserError):
    """A request without a completion.

    lasting: no request can succeed until somebody acts. `bill` is what the attempts may have cost.
    """

    def __init__(self, message: str, *, bill: Bill = NO_BILL, lasting: bool = False) -> None:
        super().__init__(message)
        self.bill = bill
        self.lasting = lasting


class BudgetExceededError(UserError):
    """The next request could exceed the budget. It was not sent, and labelling stops.

    `bill` is what earlier attempts at the same request may have cost.
    """

    bill = NO_BILL


class CostMeter:
    """What was spent, and a hard stop before the budget: each request is reserved, then settled.

    Prices are US dollars per million tokens. A prompt is reserved at four characters a token, an estimate.
    """

    def __init__(self, config: JudgeConfig, *, section: str) -> None:
        self.spent = Bill()
        self._config = config
        self._section = section
        self._reserved_usd = 0.0

    def bill(self, input_tokens: int, output_tokens: int) -> Bill:
        """Of one request."""
        input_price = self._config.price_per_million_input_tokens
        output_price = self._config.price_per_million_output_tokens
        return Bill(1, input_tokens, output_tokens, (input_tokens * input_price + output_tokens * output_price) / 1e6)

    def bound(self, messages: Sequence[Message]) -> Bill:
        """Of one request that has not been answered: its prompt, and the longest reply."""
        chars = sum(len(message["content"]) for message in messages)
        return self.bill(-(-chars // CHARS_PER_TOKEN), self._config.max_output_tokens)

    def reserve(self, bound: Bill) -> None:
        """Raises BudgetExceededError when the bound does not fit beside what is spent and under way."""
        spent, under_way = self.spent.cost_usd, self._reserved_usd
        # The slack is for the dust of floating-point sums, far below any price.
        if spent + under_way + bound.cost_usd > self._config.max_cost_usd + 1e-9:
            raise BudgetExceededError(
                f"the judge's budget of ${self._config.max_cost_usd:.4f} is used up: ${spent:.4f} spent, "
                f"${under_way:.4f} under way, and the next request may cost ${bound.cost_usd:.4f}; "
                f"raise {self._section}.max_cost_usd and run again, nothing that was paid is asked twice"
            )
        self._reserved_usd += bound.cost_usd

    def settle(self, bound: Bill, billed: Bill) -> None:
        """Replaces a reserved bound by what was billed."""
        self._reserved_usd -= bound.cost_usd
        self.charge(billed)

    def charge(self, billed: Bill) -> None:
        self.spent += billed


class ChatClient:
    """Asks one model of one server, retries what may pass, and charges `meter`.

    `section` is the table of the recipe that `config` comes from, for what errors advise. Raises ApiKeyError when the
    key that the configuration names is not there.
    """

    def __init__(self, config: JudgeConfig, *, section: str, sleep: Sleep = asyncio.sleep) -> None:
        self.meter = CostMeter(config, section=section)
        self._config = config
        self._section = section
        self._service = chat_service(
            config.base_url,
            config,
            section=section,
            sleep=sleep,
            first_pause_s=1.0,
            requests_per_minute=config.requests_per_minute,
            max_concurrency=config.max_concurrency,
        )

    async def complete(self, messages: Sequence[Message]) -> ChatReply:
        """The model's answer. Raises ChatError, and BudgetExceededError before an attempt that may cost too much."""
        bills: list[Bill] = []
        try:
            text = await self._service.ask(lambda: self._attempt(messages, bills))
        except BudgetExceededError as stop:
            stop.bill = sum(bills, start=Bill())
            raise
        except HttpError as error:
            raise self._failure(error, sum(bills, start=Bill())) from None
        return ChatReply(text=text, bill=sum(bills, start=Bill()))

    async def _attempt(self, messages: Sequence[Message], bills: list[Bill]) -> str:
        bound = self.meter.bound(messages)
        self.meter.reserve(bound)
        billed = bound
        try:
            completion = chat_completion(
                await self._service.send("POST", "/chat/completions", body=self._body(messages))
            )
            if completion.input_tokens is not None and completion.output_tokens is not None:
                billed = self.meter.bill(completion.input_tokens, completion.output_tokens)
            return completion.text
        except HttpError as error:
            # A reply that was lost may have been billed; a refusal was not.
            if isinstance(error, UnreachableError) or error.status not in (None, 200):
                billed = Bill(requests=1)
            raise
        finally:
            self.meter.settle(bound, billed)
            bills.append(billed)

    def _body(self, messages: Sequence[Message]) -> dict[str, object]:
        return {
            "model": self._config.model,
            "messages": list(messages),
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_output_tokens,
            "stream": False,
        }

    def _failure(self, error: HttpError, bill: Bill) -> ChatError:
        about_this_request = error.status in _ABOUT_THIS_REQUEST
        said = f' ("{error.words}")' if about_this_request and error.words else ""
        advice = chat_advice(error, self._section, "check {section}.model and {section}.max_output_tokens")
        lasting = isinstance(error, RefusedError) and not about_this_request
        return ChatError(f"{self._config.base_url}: {error}{said}; {advice}", bill=bill, lasting=lasting)


def as_data(text: str) -> str:
    """For a prompt: without the sign that opens every delimiter, ours and those of the models' own chat templates."""
    return whole_letters(text.replace("<", "‹"))
