"""Runs code that nobody vouches for; the boundary is the kernel, not the language."""

from envs.sandbox.episode import Episode
from envs.sandbox.sandbox import Sandbox, SandboxRefusedError, SandboxState
from envs.sandbox.settings import LAYERS, SandboxSettings

__all__ = ["LAYERS", "Episode", "Sandbox", "SandboxRefusedError", "SandboxSettings", "SandboxState"]
