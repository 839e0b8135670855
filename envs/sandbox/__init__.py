"""Code that a model wrote, run where it can hurt nobody."""

from envs.sandbox.sandbox import Episode, Sandbox, SandboxError
from envs.sandbox.settings import SandboxSettings

__all__ = ["Episode", "Sandbox", "SandboxError", "SandboxSettings"]
