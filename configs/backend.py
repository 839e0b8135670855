"""What answers the planner outside of training: this process, or a server that speaks chat messages."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from configs.api_keys import PlainUrl, in_clear_text
from configs.base import Config, typed


class VllmConfig(Config):
    """vLLM in this process, with the recipe's own model: what it samples can be trained on."""

    type: Literal["vllm"] = "vllm"


class ServedConfig(Config):
    """A server. It tells no token ids and no log-probs, so what it answers can never be trained on."""

    model: str = Field(min_length=1, max_length=200)
    """The server's name of the model."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the API key; none sends no key."""
    request_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Wall-clock limit of one request."""
    max_retries: int = Field(default=3, ge=0, le=10)
    """Further attempts after a passing failure."""
    max_concurrency: int = Field(default=4, ge=1, le=256)
    """Trajectories that ask a server at a time."""
    base_url: PlainUrl
    """Address of the server."""

    @model_validator(mode="after")
    def _key_is_safe(self) -> Self:
        if self.api_key_env is not None and in_clear_text(self.base_url):
            raise ValueError(f"base_url {self.base_url} would send the key in clear text: use https")
        return self


class OllamaConfig(ServedConfig):
    """Ollama's native API."""

    type: Literal["ollama"] = "ollama"
    base_url: PlainUrl = "http://127.0.0.1:11434"
    """Address of the server; the default is Ollama's usual one on this machine."""


class OpenAiConfig(ServedConfig):
    """Any server with OpenAI's chat completions."""

    type: Literal["openai"] = "openai"
    base_url: PlainUrl = "http://127.0.0.1:8000/v1"
    """Address of the server; the default is vLLM's usual one on this machine."""
    form: Literal["json_schema", "vllm_grammar"] = "json_schema"
    """How the server is told the form of a reply: `json_schema` is OpenAI's `response_format`; `vllm_grammar` is the
    planner's own grammar, which only vLLM's server takes."""


BackendConfig = Annotated[VllmConfig | OllamaConfig | OpenAiConfig, Field(discriminator="type"), typed("vllm")]
