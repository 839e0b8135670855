"""Language models that judge steps and answers: which is asked, how often, and what it may cost."""

from typing import Self

from pydantic import Field, field_validator, model_validator

from configs.api_keys import PlainUrl, in_clear_text, on_this_machine
from configs.base import Config


class JudgeConfig(Config):
    base_url: PlainUrl = "http://127.0.0.1:11434/v1"
    """Root of a server that speaks the OpenAI chat-completions protocol; the default is a local Ollama."""
    model: str = Field(min_length=1, max_length=200)
    """The server's name of the judging model."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the API key. None sends no key: a local server needs none, and a key
    leaves this machine only for a server that the configuration names it for."""
    temperature: float = Field(default=0.7, ge=0, le=2)
    """Sampling temperature; several votes need one above 0, or they would be copies of one another."""
    num_votes: int = Field(default=3, ge=1, le=9)
    """Blind verdicts per step or answer, an odd number: their median or majority counts."""
    request_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Wall-clock limit of one request."""
    max_retries: int = Field(default=4, ge=0, le=10)
    """Further attempts after a passing failure, and further replies after one without a verdict."""
    requests_per_minute: float = Field(default=60.0, gt=0, le=1_000_000)
    """Requests are started no faster than this."""
    max_concurrency: int = Field(default=4, ge=1, le=256)
    """Requests under way at a time."""
    price_per_million_input_tokens: float = Field(default=0.0, ge=0, le=10_000)
    """US dollars; 0 for a local server."""
    price_per_million_output_tokens: float = Field(default=0.0, ge=0, le=10_000)
    """US dollars; 0 for a local server."""
    max_cost_usd: float = Field(default=1.0, ge=0, le=100_000)
    """Judging stops before the request that could exceed this, earlier runs on the same receipts included; before it is
    sent, a prompt counts as a token for each four characters."""
    max_output_tokens: int = Field(default=1024, ge=16, le=32_768)
    """Longest reply, a reasoning model's thoughts included."""

    @field_validator("num_votes")
    @classmethod
    def _odd_votes(cls, num_votes: int) -> int:
        if num_votes % 2 == 0:
            raise ValueError(f"num_votes must be odd, so that the median is a verdict, got {num_votes}")
        return num_votes

    @model_validator(mode="after")
    def _votes_differ(self) -> Self:
        if self.num_votes > 1 and self.temperature == 0:
            raise ValueError(f"{self.num_votes} votes at temperature 0 are copies: raise temperature or ask for 1 vote")
        return self

    @model_validator(mode="after")
    def _key_and_money_are_safe(self) -> Self:
        if self.api_key_env is None or on_this_machine(self.base_url):
            return self
        if in_clear_text(self.base_url):
            raise ValueError(f"base_url {self.base_url} would send the key in clear text: use https")
        if not (self.price_per_million_input_tokens and self.price_per_million_output_tokens):
            raise ValueError(
                "a remote server with a key bills its tokens: set both prices, or max_cost_usd sees nothing"
            )
        return self


class StepJudgeConfig(JudgeConfig):
    max_spread: float = Field(default=0.4, ge=0, le=1)
    """Votes that lie further apart than this disagree, and the step gets no label."""
