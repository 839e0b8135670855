"""Chat completions over HTTP, in the protocol that DeepSeek, vLLM and Ollama share, within a budget."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from configs.api_keys import find_key, how_to_set
from configs.errors import UserError
from configs.judge import JudgeConfig
from envs.http import retry_after_s

CHARS_PER_TOKEN = 4
LONGEST_PAUSE_S = 120.0
MAX_QUOTED_CHARS = 200

Message = dict[str, str]
Sleep = Callable[[float], Awaitable[object]]

_PASSING = (408, 425, 429)
_ABOUT_THIS_REQUEST = (400, 413, 422)
_ADVICE = {
    401: "set a valid key in the variable that {section}.api_key_env names",
    402: "top up the account's balance",
    403: "the key has no access: check it, and the model",
    404: "check {section}.base_url and {section}.model",
}
_OTHER_ADVICE = "check {section}.model and {section}.max_output_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What requests used: their number, tokens and US dollars."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )


NO_BILL = Bill()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A completion. `bill` covers every attempt it took; one whose reply was lost counts at its bound."""

    text: str
    bill: Bill


class ChatError(UserError):
    """A request without a completion.

    retryable: the same request may succeed later. about_request: the server answers, but not to this request.
    Neither: no request can succeed until somebody acts. `bill` is what the attempts may have cost.
    """

    def __init__(
        self,
        message: str,
        *,
        bill: Bill = NO_BILL,
        retryable: bool = False,
        about_request: bool = False,
        wait_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.bill = bill
        self.retryable = retryable
        self.about_request = about_request
        self.wait_s = wait_s


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
        self._section = section
        self._input_price = config.price_per_million_input_tokens / 1e6
        self._output_price = config.price_per_million_output_tokens / 1e6
        self._max_output_tokens = config.max_output_tokens
        self._max_cost_usd = config.max_cost_usd
        self._reserved_usd = 0.0

    def bill(self, input_tokens: int, output_tokens: int) -> Bill:
        """Of one request."""
        cost = input_tokens * self._input_price + output_tokens * self._output_price
        return Bill(requests=1, input_tokens=input_tokens, output_tokens=output_tokens, cost_usd=cost)

    def bound(self, messages: Sequence[Message]) -> Bill:
        """Of one request that has not been answered: its prompt, and the longest reply."""
        chars = sum(len(message["content"]) for message in messages)
        return self.bill(-(-chars // CHARS_PER_TOKEN), self._max_output_tokens)

    def reserve(self, bound: Bill) -> None:
        """Raises BudgetExceededError when the bound does not fit beside what is spent and under way."""
        spent, under_way = self.spent.cost_usd, self._reserved_usd
        # The slack is for the dust of floating-point sums, far below any price.
        if spent + under_way + bound.cost_usd > self._max_cost_usd + 1e-9:
            raise BudgetExceededError(
                f"the judge's budget of ${self._max_cost_usd:.4f} is used up: ${spent:.4f} spent, "
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

    `section` is the table of the recipe that `config` comes from, for what errors advise. `first_pause_s` is the pause
    before the first retry; it doubles from retry to retry. Raises ValueError when the key that the
    configuration names is not there.
    """

    def __init__(
        self, config: JudgeConfig, *, section: str, first_pause_s: float = 1.0, sleep: Sleep = asyncio.sleep
    ) -> None:
        self.meter = CostMeter(config, section=section)
        self._config = config
        self._section = section
        self._key = _key(config.api_key_env, section)
        self._first_pause_s = first_pause_s
        self._sleep = sleep
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._next_start = 0.0
        # No limit of httpx's own: it bounds each read, and a server that trickles would never meet it.
        self._http = httpx.AsyncClient(
            timeout=None, headers={"Authorization": f"Bearer {self._key}"} if self._key else None
        )

    async def complete(self, messages: Sequence[Message]) -> ChatReply:
        """The model's answer. Raises ChatError, and BudgetExceededError before an attempt that may cost too much."""
        bill, pause_s, retries_left = Bill(), self._first_pause_s, self._config.max_retries
        while True:
            try:
                outcome = await self._attempt(messages)
            except BudgetExceededError as stop:
                stop.bill = bill
                raise
            bill += outcome.bill
            if isinstance(outcome, ChatReply):
                return replace(outcome, bill=bill)
            wait_s = max(pause_s * random.uniform(1, 1.5), outcome.wait_s)
            if not (outcome.retryable and retries_left and wait_s <= LONGEST_PAUSE_S):
                outcome.bill = bill
                # Not in an `except`: the HTTP client's error holds the request, and that the key.
                raise outcome
            retries_left -= 1
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S / 2)
            await self._sleep(wait_s)

    async def close(self) -> None:
        await self._http.aclose()

    async def _attempt(self, messages: Sequence[Message]) -> ChatReply | ChatError:
        bound = self.meter.bound(messages)
        async with self._slots:
            await self._turn()
            self.meter.reserve(bound)
            billed = bound
            try:
                outcome = await self._post(messages, bound)
                billed = outcome.bill
                return outcome
            finally:
                self.meter.settle(bound, billed)

    async def _turn(self) -> None:
        """Waits for this request's start in an even row of starts."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60 / self._config.requests_per_minute
        if start > now:
            await self._sleep(start - now)

    async def _post(self, messages: Sequence[Message], bound: Bill) -> ChatReply | ChatError:
        body = {
            "model": self._config.model,
            "messages": list(messages),
            "temperature": self._config.temperature,
            "max_tokens": self._config.max_output_tokens,
            "stream": False,
        }
        limit_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._http.post(f"{self._config.base_url}/chat/completions", json=body)
        except TimeoutError:
            return self._passing(f"no reply within {limit_s} s; raise {self._section}.request_timeout_s", bound)
        except httpx.ConnectError:
            advice = f"check {self._section}.base_url and that the server runs"
            return self._passing(f"no connection; {advice}", Bill(requests=1))
        except httpx.RequestError as error:
            return self._passing(f"the connection broke ({type(error).__name__})", bound)
        return self._reply(response, bound) if response.status_code == 200 else self._refusal(response)

    def _reply(self, response: httpx.Response, bound: Bill) -> ChatReply | ChatError:
        try:
            completion = json.loads(response.content)
            text = completion["choices"][0]["message"]["content"]
        except (ValueError, RecursionError, LookupError, TypeError):
            return self._passing("status 200 without a chat completion", bound)
        usage = completion.get("usage")
        read, written = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        bill = bound if read is None or written is None else self.meter.bill(read, written)
        return ChatReply(text=text if isinstance(text, str) else "", bill=bill)

    def _passing(self, problem: str, bill: Bill, wait_s: float = 0.0) -> ChatError:
        return ChatError(f"{self._config.base_url}: {problem}", bill=bill, retryable=True, wait_s=wait_s)

    def _refusal(self, response: httpx.Response) -> ChatError:
        status, unbilled = response.status_code, Bill(requests=1)
        if status in _PASSING or status >= 500:
            return self._passing(f"status {status}; run again later", unbilled, retry_after_s(response))
        advice = _ADVICE.get(status, _OTHER_ADVICE).format(section=self._section)
        said = f' ("{self._words(response)}")' if status in _ABOUT_THIS_REQUEST else ""
        return ChatError(
            f"{self._config.base_url}: status {status}{said}; {advice}",
            bill=unbilled,
            about_request=status in _ABOUT_THIS_REQUEST,
        )

    def _words(self, response: httpx.Response) -> str:
        words = " ".join(response.text.split())
        return (words.replace(self._key, "[key]") if self._key else words)[:MAX_QUOTED_CHARS]


def _key(variable: str | None, section: str) -> str:
    if variable is None:
        return ""
    key = find_key(variable)
    if key is None:
        raise ValueError(f"the judge needs an API key: {how_to_set(variable)}, or leave {section}.api_key_env out")
    return key


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
