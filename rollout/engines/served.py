"""Engines behind an address: models that Ollama or an OpenAI-compatible server samples."""

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import ollama
import openai

from configs.api_keys import required_key
from configs.rollout import ServedConfig
from envs.tools.http import BoundedClient
from rollout.engines.engine import BackendError, ContextFullError, EngineError, GenerationRequest
from rollout.types import TextCompletion

Reply = TypeVar("Reply")

MAX_QUOTED_CHARS = 200
"""Of a server's own error text."""
REQUEST_TIMEOUT_S = 120.0
"""Wall-clock limit, which a slow model on a CPU needs for its longest reply."""
MAX_RETRIES = 3
"""Further attempts after a failure that may pass."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0
"""Pauses between attempts at Ollama, as the `openai` client has them."""
KEEP_ALIVE = "5m"
"""Time for which Ollama keeps the model loaded."""
PLAIN_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
"""Leaves the distribution as it is. The policy was trained without Ollama's defaults."""
VLLM_PLAIN_SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""The same for vLLM's server, which takes its defaults from the model's generation_config.json."""

_CONTEXT_FULL = re.compile(r"context[ _](length|size|window)|exceeds? the available context", re.IGNORECASE)
_OPENING = re.compile(r"\s*<think>")
_CLOSING = "</think>"
_CONTROL = re.compile(r"<(?=[|｜]|/?(?:s|think|start_of_turn|end_of_turn)>)")
_ADVICE = {
    401: "set a valid key in the variable that backend.api_key_env names",
    402: "top up the account's balance",
    403: "the key has no access: check it, and backend.model",
    404: "check backend.base_url and backend.model",
}


class _OllamaClient(ollama.AsyncClient):
    """Ollama's client over `BoundedClient`. A dialogue that does not fit the context is an error."""

    def __init__(self, config: ServedConfig, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # `AsyncClient.__init__` differs only in the HTTP client that it passes on.
        super(ollama.AsyncClient, self).__init__(
            BoundedClient, config.base_url, follow_redirects=False, timeout=REQUEST_TIMEOUT_S, headers=headers
        )
        if not key:
            # The client sends OLLAMA_API_KEY to any server; only `backend.api_key_env` may name a key.
            self._client.headers.pop("Authorization", None)

    async def _request_raw(self, method: str, path: str, **options: Any) -> httpx.Response:
        if path == "/api/chat":
            # `chat` has no arguments for these two. Ollama would silently drop the oldest messages or generated text.
            options["json"] |= {"truncate": False, "shift": False}
        response: httpx.Response = await super()._request_raw(method, path, **options)
        return response


class _ServedEngine:
    """An `Engine` for one model of one server."""

    _retries = 0

    def __init__(self, config: ServedConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        variable = config.api_key_env
        self._key = required_key("backend.api_key_env", variable, "or leave it out") if variable else ""

    def release(self, trajectory_id: str) -> None:
        """Do nothing: a request ends with the connection that its caller drops."""

    async def _call(self, call: Callable[[], Awaitable[Reply]]) -> Reply:
        """Return the result of a request, which is repeated after a failure that may pass."""
        for attempt in range(self._retries + 1):
            if attempt:
                # Jitter keeps workers that were refused together from coming back together.
                await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S) * random.uniform(1, 1.5))
            try:
                return await call()
            except (ollama.ResponseError, openai.OpenAIError, httpx.HTTPError, ConnectionError) as error:
                failure, may_pass = self._failure_of(error)
            except (ValueError, TypeError, RecursionError):
                failure, may_pass = self._failure("the reply cannot be read"), True
            if not may_pass:
                break
        # Outside of `except`: the client's error quotes the server, which may have repeated the key.
        raise failure

    def _failure_of(self, error: Exception) -> tuple[EngineError | BackendError, bool]:
        """Return our error for one of the clients', and whether it may pass."""
        match (error.__cause__ or error) if isinstance(error, openai.APIConnectionError) else error:
            case ollama.ResponseError(status_code=status, error=words):
                return self._refusal(status, words)
            case openai.APIStatusError(status_code=status, body=body):
                return self._refusal(status, body.get("message", body) if isinstance(body, dict) else body)
            case openai.APITimeoutError() | httpx.TimeoutException():
                return self._failure(f"no reply within {REQUEST_TIMEOUT_S:g} s"), True
            case httpx.ConnectError() | ConnectionError():
                advice = "check backend.base_url and that the server runs"
                return BackendError(self._message("no connection", None, advice)), True
            case httpx.HTTPError() as broken:
                return self._failure(f"the connection broke ({type(broken).__name__})"), True
        return self._failure("the reply cannot be read"), True

    def _refusal(self, status: int, words: object) -> tuple[EngineError | BackendError, bool]:
        """Return the error for a reply with a status from 400 on, and whether it may pass. `words` are the server's."""
        problem = f"status {status}"
        if status in (400, 413, 500) and _CONTEXT_FULL.search(str(words)):
            return ContextFullError(self._message(problem, words, "the dialogue does not fit the context")), False
        if status in (408, 425, 429) or status >= 500:
            return self._failure(problem, words), True
        advice = _ADVICE.get(status, "the server refuses the request: check backend.type and backend.form")
        return BackendError(self._message(problem, words, advice)), False

    def _failure(self, problem: str, words: object = None) -> EngineError:
        """Return an error about one request, and log it."""
        message = self._message(problem, words, "run again later")
        logging.getLogger(__name__).warning("%s", message)
        return EngineError(message)

    def _message(self, problem: str, words: object, advice: str) -> str:
        text = "" if words is None else " ".join(str(words).split())
        if self._key:
            text = text.replace(self._key, "[key]")
        quoted = f" ({text[:MAX_QUOTED_CHARS]})" if text else ""
        return f"{self._config.base_url}: {problem}{quoted}; {advice}"


class OllamaEngine(_ServedEngine):
    """A model of Ollama, through its native API.

    A model that thinks although `think` is false is refused: its answers would not be the planner's.
    """

    def __init__(self, config: ServedConfig, *, num_ctx: int, seed: int) -> None:
        """Connect to nothing yet. `num_ctx` is the context length in tokens. Raises ApiKeyError without a key."""
        super().__init__(config, seed=seed)
        self._num_ctx = num_ctx
        self._retries = MAX_RETRIES
        self._client = _OllamaClient(config, self._key)

    async def check(self) -> None:
        """Raise BackendError if the server lacks the model."""
        await self._call(lambda: self._client.show(self._config.model))

    async def installed(self) -> ollama.ListResponse.Model | None:
        """Return the server's entry of the model, with its digest and quantisation. Raises BackendError."""
        names = {self._config.model, f"{self._config.model}:latest"}
        listed = await self._call(self._client.list)
        return next((entry for entry in listed.models if entry.model in names), None)

    async def generate(self, request: GenerationRequest) -> TextCompletion:
        """Return the completion. Raises BackendError if no request can succeed, ContextFullError, else EngineError."""
        messages = chat_messages(request)
        options = {
            "num_predict": request.max_tokens,
            "num_ctx": self._num_ctx,
            "temperature": request.temperature,
            "seed": self._seed if request.seed is None else request.seed,
            **PLAIN_SAMPLING,
        }
        reply = await self._call(
            lambda: self._client.chat(
                self._config.model,
                messages,
                think=False,
                format=None if request.json_schema is None else dict(request.json_schema),
                options=options,
                keep_alive=KEEP_ALIVE,
            )
        )
        text = reply.message.content
        if text is None:
            raise self._failure("the reply holds no text")
        if reply.message.thinking or text != without_thinking(text):
            raise BackendError(
                f"{self._config.base_url}: '{self._config.model}' thinks although `think` is false; create it "
                "with the Modelfile of its export, or update Ollama"
            )
        reason = reply.done_reason
        if not reply.done or reason not in ("stop", "length"):
            raise self._failure(f"the reply is not finished (done_reason {reason!r})")
        if reason == "length" and (reply.eval_count or 0) < request.max_tokens:
            raise ContextFullError(f"{self._config.base_url}: the context length cut the reply")
        return TextCompletion(
            text=text,
            finish_reason="length" if reason == "length" else "stop",
            num_prompt_tokens=reply.prompt_eval_count or 0,
            num_tokens=reply.eval_count or 0,
        )


class OpenAiEngine(_ServedEngine):
    """A model of a server with OpenAI's chat completions. Thinking before the answer is removed."""

    def __init__(self, config: ServedConfig, *, seed: int) -> None:
        """Connect to nothing yet. Raises ApiKeyError without a key."""
        super().__init__(config, seed=seed)
        # The client reads variables of its own. Only `backend.api_key_env` may name a key.
        self._headers: dict[str, str | openai.Omit] = {} if self._key else {"Authorization": openai.Omit()}
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=config.base_url,
            max_retries=MAX_RETRIES,
            timeout=REQUEST_TIMEOUT_S,
            default_headers={"OpenAI-Organization": openai.Omit(), "OpenAI-Project": openai.Omit()},  # type: ignore[dict-item]
            # Declared for httpx2 only, but httpx is accepted as well.
            http_client=BoundedClient(base_url=config.base_url, timeout=REQUEST_TIMEOUT_S),  # type: ignore[arg-type]
        )

    async def check(self) -> None:
        """Raise BackendError if the server does not list the model."""
        listed = await self._call(lambda: self._client.models.list(extra_headers=self._headers))
        names = [str(model.id) for model in listed.data]
        if self._config.model not in names:
            raise BackendError(
                f"{self._config.base_url} serves no '{self._config.model}' but {', '.join(names[:8]) or 'nothing'}; "
                "set backend.model"
            )

    async def generate(self, request: GenerationRequest) -> TextCompletion:
        """Return the completion. Raises BackendError if no request can succeed, ContextFullError, else EngineError."""
        messages = chat_messages(request)
        body: dict[str, object] = {}
        if self._config.form == "vllm_grammar":
            body = {**VLLM_PLAIN_SAMPLING, "chat_template_kwargs": {"enable_thinking": False}}
            if request.grammar:
                body["structured_outputs"] = {"grammar": request.grammar}
        elif request.json_schema is not None:
            schema = {"name": "decision", "strict": True, "schema": dict(request.json_schema)}
            body = {"response_format": {"type": "json_schema", "json_schema": schema}}
        reply: Any = await self._call(
            lambda: self._client.chat.completions.create(
                model=self._config.model,
                messages=messages,  # type: ignore[arg-type]  # a union of typed dicts
                temperature=request.temperature,
                max_tokens=request.max_tokens,
                seed=self._seed if request.seed is None else request.seed,
                stream=False,
                extra_body=body,
                extra_headers=self._headers,
            )
        )
        try:
            choice, usage = reply.choices[0], reply.usage
            text, reason = choice.message.content, choice.finish_reason
        except (AttributeError, IndexError, TypeError):
            # The client does not validate replies.
            raise self._failure("the reply is no chat completion") from None
        if reason != "stop" and reason != "length":
            raise self._failure(f"the reply is not finished (finish_reason {reason!r})")
        return TextCompletion(
            text=without_thinking(text) if isinstance(text, str) else "",
            finish_reason=reason,
            num_prompt_tokens=getattr(usage, "prompt_tokens", None) or 0,
            num_tokens=getattr(usage, "completion_tokens", None) or 0,
        )


def chat_messages(request: GenerationRequest) -> list[dict[str, str]]:
    """Return the messages in the form that servers take.

    A server interprets control tokens anywhere in a text. Text that looks like one (`<|im_end|>` or `<｜User｜>` in a
    tool result) gets a space after its `<`, so that it cannot forge a role.
    """
    return [{"role": message.role, "content": _CONTROL.sub("< ", message.content)} for message in request.messages]


def without_thinking(text: str) -> str:
    """Return a reply without a block of thinking; empty if the thinking never ended.

    Only a block at the start is thinking: a tag that a later JSON string quotes is text. The opening tag may be missing
    (the template wrote it into the prompt), and so may the closing one (the reply was cut).
    """
    opening = _OPENING.match(text)
    body = text[opening.end() :] if opening else text
    inside, closing, answer = body.partition(_CLOSING)
    if closing and (opening or not inside.lstrip().startswith("{")):
        return answer.lstrip()
    return "" if opening else text
