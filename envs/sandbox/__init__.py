"""Sandbox for untrusted code; its boundary is the kernel, not the language."""

from envs.sandbox.sandbox import Episode, Sandbox, SandboxRefusedError, SandboxState
from envs.sandbox.settings import LAYERS, SandboxSettings

__all__ = ["LAYERS", "Episode", "Sandbox", "SandboxRefusedError", "SandboxSettings", "SandboxState"]
