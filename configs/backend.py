"""The model that answers the planner outside of training: in this process, or of a server for chat messages."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from configs.api_keys import PlainUrl, in_clear_text
from configs.base import Config, typed


class VllmConfig(Config):
    """vLLM in this process, with the recipe's own model: what it samples can be trained on."""

    type: Literal["vllm"] = "vllm"


class ServerConfig(Config):
    """A server with OpenAI's chat completions."""

    model: str = Field(min_length=1, max_length=200)
    """The server's name of the model."""
    base_url: PlainUrl
    """Address of the server."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the API key; none sends no key."""

    @model_validator(mode="after")
    def _key_is_safe(self) -> Self:
        if self.api_key_env is not None and in_clear_text(self.base_url):
            raise ValueError(f"base_url {self.base_url} would send the key in clear text: use https")
        return self


class ServedConfig(ServerConfig):
    """A served policy: Ollama through its native API, or any server with OpenAI's chat completions.

    The default address is Ollama's usual one on this machine, or vLLM's. A server reports no token ids and no
    log-probs, so its answers can never be trained on.
    """

    type: Literal["ollama", "openai"]
    max_concurrency: int = Field(default=4, ge=1, le=256)
    """Trajectories that the server works on at a time."""
    form: Literal["json_schema", "vllm_grammar"] = "json_schema"
    """Constraint of a reply's form, for `openai`: `json_schema` is OpenAI's `response_format`; `vllm_grammar` is the
    planner's own grammar, which only vLLM's server takes."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_address(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or "base_url" in values:
            return values
        return {**values, "base_url": DEFAULT_URLS.get(str(values.get("type")), "")}

    @model_validator(mode="after")
    def _form_is_for_openai(self) -> Self:
        if self.type == "ollama" and self.form != "json_schema":
            raise ValueError(f"form = '{self.form}' is for type = 'openai': leave it out for Ollama")
        return self


DEFAULT_URLS = {"ollama": "http://127.0.0.1:11434", "openai": "http://127.0.0.1:8000/v1"}


BackendConfig = Annotated[VllmConfig | ServedConfig, Field(discriminator="type"), typed("vllm")]
