"""What answers the planner outside of training: this process, or a server that speaks chat messages."""

from typing import Literal

from pydantic import Field, HttpUrl, TypeAdapter, field_validator, model_validator

from configs.base import Config
from configs.judge import LOOPBACK

DEFAULT_URLS = {"ollama": "http://127.0.0.1:11434", "openai": "http://127.0.0.1:8000/v1"}


class BackendConfig(Config):
    kind: Literal["vllm", "ollama", "openai"] = "vllm"
    """`vllm` samples in this process; `ollama` asks Ollama's native API; `openai` any server with OpenAI's chat
    completions. A server tells no token ids and no log-probs, so what it answers can never be trained on."""
    model: str | None = Field(default=None, min_length=1, max_length=200)
    """The server's name of the model."""
    base_url: str | None = None
    """Address of the server; by default Ollama's or vLLM's usual one on this machine."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the API key; none sends no key."""
    form: Literal["json_schema", "vllm_grammar"] = "json_schema"
    """How an `openai` server is told the form of a reply: `json_schema` is OpenAI's `response_format`;
    `vllm_grammar` is the planner's own grammar, which only vLLM's server takes."""
    keep_alive: str = Field(default="5m", pattern=r"^-?\d+(ms|s|m|h)?$")
    """How long Ollama keeps the model loaded after a request."""
    request_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Wall-clock limit of one request."""
    max_retries: int = Field(default=3, ge=0, le=10)
    """Further attempts after a passing failure."""
    max_concurrency: int = Field(default=4, ge=1, le=256)
    """Trajectories that ask a server at a time."""

    @property
    def url(self) -> str:
        return self.base_url or DEFAULT_URLS.get(self.kind, "")

    @field_validator("base_url")
    @classmethod
    def _plain_url(cls, base_url: str | None) -> str | None:
        if base_url is None:
            return None
        url = TypeAdapter(HttpUrl).validate_python(base_url)
        if url.username or url.password or url.query or url.fragment:
            raise ValueError("base_url must hold no user, password, query or fragment; a key belongs in api_key_env")
        return base_url.rstrip("/")

    @model_validator(mode="after")
    def _server_is_named(self) -> "BackendConfig":
        if self.kind != "vllm" and self.model is None:
            raise ValueError(f"backend.kind = '{self.kind}' needs backend.model, the server's name of the model")
        if self.kind != "openai" and self.form != "json_schema":
            raise ValueError(f"backend.form = '{self.form}' is for backend.kind = 'openai'")
        return self

    @model_validator(mode="after")
    def _key_is_safe(self) -> "BackendConfig":
        if self.api_key_env is None or self.kind == "vllm":
            return self
        url = TypeAdapter(HttpUrl).validate_python(self.url)
        if url.scheme != "https" and url.host not in LOOPBACK:
            raise ValueError(f"base_url {self.url} would send the key in clear text: use https")
        return self
