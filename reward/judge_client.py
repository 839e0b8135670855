"""Client of judge models: chat completions over the OpenAI protocol, within a budget."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from operator import add

import httpx2
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    DefaultAsyncHttpxClient,
    Omit,
)

from configs.api_keys import on_this_machine, required_key
from configs.errors import UserError, whole_letters
from configs.reward import JudgeConfig

CHARS_PER_TOKEN = 4
REQUESTS_PER_MINUTE = 60.0
MAX_OPEN_REQUESTS = 4
LONGEST_BACKOFF_S = 60.0
"""Longest pause that the openai client makes before it retries."""

Message = dict[str, str]

_ADVICE = {
    401: "set a valid key in the variable that {section}.api_key_env names",
    402: "top up the account's balance",
    403: "the key has no access: check it, and {section}.model",
    404: "check {section}.base_url and {section}.model",
}
"""Remedy for each status that every further request would get as well."""


@dataclass(frozen=True, slots=True)
class Bill:
    """Usage of one or more requests."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: "Bill") -> "Bill":
        return Bill(*map(add, astuple(self), astuple(other)))

    def __mul__(self, count: int) -> "Bill":
        return Bill(*(count * value for value in astuple(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One completion."""

    text: str
    bill: Bill
    """Usage of all attempts. A failed attempt counts at its bound, because it may be billed."""


class ChatError(UserError):
    """A request without a completion."""

    def __init__(self, message: str, *, bill: Bill = Bill(), lasting: bool = False) -> None:
        super().__init__(message)
        self.bill = bill
        """Highest possible usage of the failed attempts."""
        self.lasting = lasting
        """True if every further request fails as well: a refused key, an unknown model, a spent budget."""


class BudgetExceededError(ChatError):
    """The next request could exceed the budget and was not sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, lasting=True)


class ChatClient:
    """Client of one model on one server. Retries transient failures and stops before the budget is exceeded.

    Prices are US dollars per million tokens. A prompt is estimated at four characters per token before it is sent.
    """

    def __init__(self, config: JudgeConfig, *, section: str) -> None:
        """Raise ApiKeyError if the key that the configuration names is missing.

        `section` is the recipe's table that `config` comes from; errors name its settings.
        """
        self.spent = Bill()
        self._config = config
        self._section = section
        self._reserved_usd = 0.0
        self._slots = asyncio.Semaphore(MAX_OPEN_REQUESTS)
        self._next_start = 0.0
        self._key = (
            required_key(f"{section}.api_key_env", config.api_key_env, "or leave it out") if config.api_key_env else ""
        )
        self._client = AsyncOpenAI(
            base_url=config.base_url,
            api_key=self._key or "none",
            max_retries=config.max_retries,
            timeout=config.request_timeout_s,
            # A proxy of the environment cannot reach a server on this machine.
            http_client=DefaultAsyncHttpxClient(trust_env=not on_this_machine(config.base_url)),
        )

    def bound(self, messages: Sequence[Message]) -> Bill:
        """Return the highest usage of one attempt: its prompt and the longest reply."""
        num_chars = sum(len(message["content"]) for message in messages)
        return self._bill(-(-num_chars // CHARS_PER_TOKEN), self._config.max_output_tokens)

    async def complete(self, messages: Sequence[Message]) -> ChatReply:
        """Return the model's reply.

        Raises:
            BudgetExceededError: the request and its retries could exceed `max_cost_usd`; nothing was sent.
            ChatError: the server gave no completion.
        """
        config, bound = self._config, self.bound(messages)
        async with self._slots, self._reservation(bound * (config.max_retries + 1)):
            await self._wait_for_start()
            bill = bound * (config.max_retries + 1)
            failure: ChatError
            try:
                # The client's own timeout applies to each read; this one also ends a server that trickles.
                limit_s = (config.max_retries + 1) * (config.request_timeout_s + LONGEST_BACKOFF_S)
                async with asyncio.timeout(limit_s):
                    response = await self._client.chat.completions.with_raw_response.create(
                        model=config.model,
                        messages=list(messages),  # type: ignore[arg-type]
                        temperature=config.temperature,
                        max_tokens=config.max_output_tokens,
                        # A server without a key gets no header, not even one of a variable that the client knows.
                        extra_headers={} if self._key else {"Authorization": Omit()},
                    )
                retried = bound * response.retries_taken
                bill = retried + bound
                try:
                    completion = response.parse()
                    text = completion.choices[0].message.content or ""
                    usage = completion.usage
                    if usage is not None:
                        bill = retried + self._bill(usage.prompt_tokens, usage.completion_tokens)
                    return ChatReply(text=text, bill=bill)
                except (ValueError, LookupError, TypeError, AttributeError):
                    failure = ChatError(f"{config.base_url} sent no chat completion; run again later", bill=bill)
            except APIStatusError as error:
                # A refused request is not billed.
                bill = Bill(requests=config.max_retries + 1)
                failure = self._refusal(error, bill)
            except (APIError, TimeoutError) as error:
                if isinstance(error.__cause__, httpx2.ConnectError):
                    bill = Bill(requests=config.max_retries + 1)
                failure = self._lost(error, bill)
            finally:
                self.spent += bill
        # Raised outside of the handlers: the client's errors hold the request, and that holds the key.
        raise failure

    def _bill(self, input_tokens: int, output_tokens: int) -> Bill:
        input_usd = input_tokens * self._config.price_per_million_input_tokens / 1e6
        output_usd = output_tokens * self._config.price_per_million_output_tokens / 1e6
        return Bill(1, input_tokens, output_tokens, input_usd + output_usd)

    @asynccontextmanager
    async def _reservation(self, bound: Bill) -> AsyncIterator[None]:
        """Hold the bound of a request while it is sent, so that parallel requests cannot exceed the budget."""
        spent, reserved, budget = self.spent.cost_usd, self._reserved_usd, self._config.max_cost_usd
        # The slack absorbs rounding of floating-point sums; it is far below any price.
        if spent + reserved + bound.cost_usd > budget + 1e-9:
            raise BudgetExceededError(
                f"{self._section}.max_cost_usd = {budget:.4f} is used up: {spent:.4f} US dollars spent, {reserved:.4f} "
                f"reserved, and the next request with its retries may cost {bound.cost_usd:.4f}; raise it and run "
                "again: replies that were paid for are kept"
            )
        self._reserved_usd += bound.cost_usd
        try:
            yield
        finally:
            self._reserved_usd -= bound.cost_usd

    async def _wait_for_start(self) -> None:
        """Start requests at an even pace of REQUESTS_PER_MINUTE."""
        now = time.monotonic()
        start = max(now, self._next_start)
        self._next_start = start + 60 / REQUESTS_PER_MINUTE
        await asyncio.sleep(start - now)

    def _refusal(self, error: APIStatusError, bill: Bill) -> ChatError:
        status, section = error.status_code, self._section
        transient = status in (408, 409, 429) or status >= 500
        if transient:
            advice = "run again later"
        else:
            advice = _ADVICE.get(status, "check {section}.model and {section}.max_output_tokens").format(
                section=section
            )
        # The server may repeat the key, or write a page of HTML.
        detail = " ".join(str(error.message).replace(self._key or "\0", "[key]").split())[:200]
        message = f"{self._config.base_url}: status {status} ({detail}); {advice}"
        return ChatError(message, bill=bill, lasting=not transient and status not in (400, 413, 422))

    def _lost(self, error: Exception, bill: Bill) -> ChatError:
        if isinstance(error, APITimeoutError | TimeoutError):
            problem, advice = "no reply in time", f"raise {self._section}.request_timeout_s"
        elif isinstance(error, APIConnectionError):
            problem, advice = "no connection", f"check {self._section}.base_url and that the server runs"
        else:
            problem, advice = f"a reply that cannot be read ({type(error).__name__})", "run again later"
        return ChatError(f"{self._config.base_url}: {problem}; {advice}", bill=bill)


def as_data(text: str) -> str:
    """Return text without the sign that opens delimiters, ours and those of the models' own chat templates."""
    return whole_letters(text.replace("<", "‹"))
