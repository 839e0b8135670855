"""The host's handle on the zygote: started from a clean environment, asked for one link per episode."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from envs.sandbox.frames import READY, receive_frame, send_frame
from envs.sandbox.settings import LAYERS, SandboxSettings, encode_settings

_PACKAGES = ("numpy", "sympy", "mpmath")
_START_TIMEOUT_S = 60.0
_BOOT = "import sys; sys.path.append(sys.argv[1]); from envs.sandbox.zygote import main; main()"
_FLAGS = ("-s", "-P", "-S", "-X", "utf8", "-W", "ignore::SyntaxWarning", "-W", "ignore::DeprecationWarning")
# The only variables: fixed hashes, and one thread, because a process with threads cannot be forked safely.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class SandboxRefusedError(RuntimeError):
    """This machine cannot give the layers that the settings require, so nothing is run at all."""


class ZygoteProcess:
    def __init__(self, settings: SandboxSettings) -> None:
        """A plain subprocess: code between fork and exec would be unsafe in a host with threads."""
        self._link, inside = socket.socketpair()
        with inside:
            self._process = subprocess.Popen(
                [sys.executable, *_FLAGS, "-c", _BOOT, str(Path(__file__).parents[2])],
                env=_ENVIRONMENT,
                cwd="/",
                stdin=inside.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self.layers = self._start(settings)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: SandboxSettings) -> tuple[str, ...]:
        self._link.settimeout(_START_TIMEOUT_S)
        order = {"settings": encode_settings(settings), "packages": _package_sources()}
        try:
            send_frame(self._link, json.dumps(order).encode())
            report = receive_frame(self._link)
            missing = json.loads(report)["missing"]
            _require_layers(settings, missing)
            ready = receive_frame(self._link)
        except (OSError, ValueError) as error:
            raise SandboxRefusedError(f"the sandbox did not start: {error}") from error
        if ready != READY:
            raise SandboxRefusedError(f"the sandbox did not start: {ready.decode(errors='replace')}")
        self._link.settimeout(None)
        return tuple(layer for layer in LAYERS if layer not in missing)

    def open_link(self) -> socket.socket:
        """A connection to a new warden. OSError when the zygote is gone."""
        if self._process.poll() is not None:  # a dying zygote may still take a request, and never answer
            raise ConnectionError("the zygote is gone")
        outside, inside = socket.socketpair()
        with inside:
            try:
                socket.send_fds(self._link, [b"e"], [inside.fileno()])
            except OSError:
                outside.close()
                raise
        return outside

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
        self._process.kill()
        self._process.wait()


def _require_layers(settings: SandboxSettings, missing: dict[str, str]) -> None:
    lacking = sorted(settings.required_layers & set(missing))
    if lacking and not settings.unsafe_ok:
        reasons = "; ".join(f"{layer}: {missing[layer]}" for layer in lacking)
        raise SandboxRefusedError(
            f"the sandbox requires {', '.join(sorted(settings.required_layers))}, but lacks {reasons}. "
            "Allow user namespaces and seccomp to this user or container, or, for trusted code only, "
            "set unsafe_ok"
        )


def _package_sources() -> dict[str, str]:
    """Name in the jail -> directory here; wheels of numpy keep their libraries in a sibling."""
    sources: dict[str, str] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise SandboxRefusedError(f"the sandbox needs the package {name}, which is not installed")
        path = os.path.realpath(next(iter(spec.submodule_search_locations)))
        for candidate in (path, f"{path}.libs"):
            if os.path.isdir(candidate):
                sources[os.path.basename(candidate)] = candidate
    return sources
