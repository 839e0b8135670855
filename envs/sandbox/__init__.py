"""Sandbox for untrusted code; its boundary is the kernel, not the language."""

from envs.sandbox.protocol import LAYERS, SandboxSettings
from envs.sandbox.sandbox import Episode, Sandbox, SandboxRefusedError, SandboxState

__all__ = ["LAYERS", "Episode", "Sandbox", "SandboxRefusedError", "SandboxSettings", "SandboxState"]
