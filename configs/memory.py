"""Memory across episodes: how earlier successes are kept, and which of them the planner is shown."""

from pydantic import Field, HttpUrl, TypeAdapter, model_validator

from configs.api_keys import exposed_key
from configs.base import Config
from configs.judge import LOOPBACK

IN_PROCESS = ":memory:"


class MemoryConfig(Config):
    enabled: bool = False
    """Remember trajectories that were right in training, and show what they did as hints for similar tasks."""
    location: str = Field(default=IN_PROCESS, min_length=1)
    """Where Qdrant keeps them: `:memory:` (each worker its own, gone with it), a folder (for one worker), or the
    address of a Qdrant server, http://host:port (for all workers together)."""
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the server's API key; none sends no key."""
    collection: str = Field(default="agentflow_experience", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Name of the Qdrant collection."""
    top_k: int = Field(default=3, ge=1, le=20)
    """Hints per task at most."""
    min_similarity: float = Field(default=0.5, ge=-1, le=1)
    """Cosine similarity of two questions from which on one is a hint for the other."""
    max_entry_chars: int = Field(default=300, ge=50, le=4000)
    """Length limit of one hint."""
    max_entries: int = Field(default=10_000, ge=1)
    """When so many are kept, further ones are not added."""
    in_evaluation: bool = False
    """Show hints in evaluations and to `solve` too. Without it they measure the policy alone."""

    @property
    def is_server(self) -> bool:
        return self.location.startswith(("http://", "https://"))

    @property
    def serves_one_worker(self) -> bool:
        return not self.is_server and self.location != IN_PROCESS

    @model_validator(mode="after")
    def _key_goes_to_a_server_and_safely(self) -> "MemoryConfig":
        if self.is_server and (where := exposed_key(self.location)):
            raise ValueError(
                f"location holds what looks like a key, {where}; name its variable with api_key_env instead"
            )
        if self.api_key_env is None:
            return self
        if not self.is_server:
            raise ValueError(f"api_key_env is for a Qdrant server, but location is '{self.location}'")
        url = TypeAdapter(HttpUrl).validate_python(self.location)
        if url.scheme != "https" and url.host not in LOOPBACK:
            raise ValueError(f"location {self.location} would send the key in clear text: use https")
        return self
