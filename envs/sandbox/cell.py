"""The code process: forked into its own cell, it gives up every right and then serves code texts."""

import fcntl
import os
import signal
import socket
from dataclasses import dataclass
from typing import NoReturn

from envs.sandbox import kernel
from envs.sandbox.frames import BORN, READY, FrameError, encode_frame, send_frame, split_frame
from envs.sandbox.landlock import restrict_files
from envs.sandbox.limits import apply_limits
from envs.sandbox.runner import Runner
from envs.sandbox.seccomp import CELL_CALLS, CELL_CHOSEN, CELL_WITHOUT, filter_program, restrict_calls
from envs.sandbox.settings import SandboxSettings
from envs.sandbox.tiers import Tier

NONCE_BYTES = 16
_STDIN, _OUTPUTS, _REQUESTS, _RESULTS = 0, (1, 2), 3, 4
_FIRST_UNUSED, _LAST_UNUSED = 5, 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlan:
    """What every code process of a zygote has in common."""

    settings: SandboxSettings
    tier: Tier
    layers: frozenset[str]
    readable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """The warden's side of a code process: descriptors of its requests, results and output."""

    pid: int
    pidfd: int
    requests: int
    results: int
    output: int


def start_cell(plan: CellPlan, folder: str, link: socket.socket) -> Cell:
    """In `folder`, the only one that it may write to. The kernel tells the host by `link` which process it is."""
    request_reader, request_writer = os.pipe()
    result_reader, result_writer = os.pipe()
    output_reader, output_writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live_in_cell(plan, folder, link, (request_reader, result_writer, output_writer))
    for inside in (request_reader, result_writer, output_writer):
        os.close(inside)
    for outside in (request_writer, result_reader, output_reader):
        os.set_blocking(outside, False)
    return Cell(pid, os.pidfd_open(pid), request_writer, result_reader, output_reader)


def _live_in_cell(plan: CellPlan, folder: str, link: socket.socket, pipes: tuple[int, int, int]) -> NoReturn:
    try:
        send_frame(link, BORN)
        _arrange_descriptors(*pipes)
        try:
            _drop_rights(plan, folder)
        except OSError as error:
            os.write(_RESULTS, encode_frame(f"the code process could not drop its rights: {error}".encode()))
            os._exit(1)
        runner = Runner(check_imports=plan.settings.check_imports)
        os.write(_RESULTS, encode_frame(READY))
        _serve(runner)
    finally:
        os._exit(1)


def _arrange_descriptors(requests: int, results: int, output: int) -> None:
    """Only five descriptors pass into the cell; input() meets the end of a file."""
    nothing, writer = os.pipe()
    os.close(writer)
    wanted = (nothing, output, output, requests, results)
    # Out of the way first: a source may sit on a number that another one is about to take.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _LAST_UNUSED >> 8) for descriptor in wanted]
    for descriptor, number in zip(high, (_STDIN, *_OUTPUTS, _REQUESTS, _RESULTS), strict=True):
        os.dup2(descriptor, number)
    os.closerange(_FIRST_UNUSED, _LAST_UNUSED)


def _drop_rights(plan: CellPlan, folder: str) -> None:
    """Order matters: each step forbids something that the earlier ones need."""
    os.setsid()
    os.umask(0o077)
    os.environ.clear()
    os.chdir(folder)
    if "rlimits" in plan.layers:
        apply_limits(plan.settings)
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    kernel.set_dumpable(False)
    if "landlock" in plan.layers:
        if plan.tier == "namespaces":
            restrict_files(plan.readable, writable=(folder,))
        else:
            restrict_files(plan.readable, addable=(folder,))
    kernel.die_with_parent(signal.SIGKILL)
    if "seccomp" in plan.layers:
        restrict_calls(filter_program(CELL_CALLS, CELL_CHOSEN, CELL_WITHOUT))


def _serve(runner: Runner) -> None:
    received = b""
    while chunk := os.read(_REQUESTS, 1 << 16):
        received += chunk
        while (split := split_frame(received)) is not None:
            request, received = split
            nonce, source = request[:NONCE_BYTES], request[NONCE_BYTES:]
            category, message = runner.run(source)
            _answer(nonce + f"{category}\n{message}".encode(errors="backslashreplace"))


def _answer(payload: bytes) -> None:
    frame = encode_frame(payload)
    if os.write(_RESULTS, frame) != len(frame):
        raise FrameError("the result pipe is full")
