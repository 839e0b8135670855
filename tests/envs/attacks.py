"""The attack corpus, and canaries on the host that detect an escape."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SECRET = "CANARY_SECRET_5f1d"
PUBLIC_TIMEOUT_S = 0.5
SLACK_S = 10.0  # generous: a loaded machine kills and buries late, a broken one never
_HERE = Path(__file__).parent
_PUBLIC = _HERE.parent / "golden" / "attacks.json"

Attack = dict[str, Any]


def all_attacks() -> list[Attack]:
    """Return the attacks of this project and the public ones.

    An attack that ends before its time limit gets a long one, because a busy machine may pause for seconds.
    """
    attacks, public = json.loads((_HERE / "attacks.json").read_text()), json.loads(_PUBLIC.read_text())
    own = [one if "timeout" in one.get("error", ["timeout"]) else one | {"timeout_s": 20.0} for one in attacks]
    return own + [attack | {"timeout_s": PUBLIC_TIMEOUT_S} for attack in public]


@dataclass(frozen=True, slots=True)
class Canaries:
    """Files and listeners of the host that no code may read, change or connect to."""

    directory: Path
    listeners: tuple[socket.socket, ...]

    @property
    def file(self) -> Path:
        return self.directory / "secret.txt"

    def place_in(self, code: str) -> str:
        """Fill in the canaries and this process, which is attacked."""
        port = self.listeners[0].getsockname()[1]
        name = self.listeners[-1].getsockname()[1:].decode()
        for mark, value in (
            ("CANARY_PORT", str(port)),
            ("CANARY_FILE", str(self.file)),
            ("CANARY_DIR", str(self.directory)),
            ("CANARY_NAME", name),
            ("CANARY_PID", str(os.getpid())),
        ):
            code = code.replace(mark, value)
        return code

    def touched(self) -> list[str]:
        signs = []
        if os.listdir(self.directory) != ["secret.txt"] or self.file.read_text() != SECRET:
            signs.append("a file of the host changed")
        for listener in self.listeners:
            try:
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(1)
                else:
                    listener.accept()[0].close()
                signs.append(f"{listener.family.name} was reached")
            except BlockingIOError:
                continue
        return signs


@contextmanager
def placed_canaries(directory: Path) -> Iterator[Canaries]:
    """Place a secret in a file and in the environment, and open listeners on TCP, UDP and an abstract socket."""
    (directory / "secret.txt").write_text(SECRET)
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(tcp.getsockname())
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0canary-{os.getpid()}")
        abstract.listen()
        for listener in (tcp, udp, abstract):
            listener.setblocking(False)
        os.environ["CANARY_ENV"] = SECRET
        stack.callback(os.environ.pop, "CANARY_ENV")
        yield Canaries(directory, (tcp, udp, abstract))


def signs_of_escape(attack: Attack, text: str, error: str | None, *, tier: str = "namespaces") -> list[str]:
    """Return the signs of an escape in the result of an attack under all layers of a tier.

    Attacks with `asks_for_paths` only ask whether a path of the host exists, which `landlock` cannot hide. An attack
    that the import check answers was never run.
    """
    bad = () if tier == "landlock" and attack.get("asks_for_paths") else attack["bad"]
    signs = [one for one in (*bad, SECRET) if one in text]
    if error == "forbidden-import":
        signs.append("the import check answered, and not the kernel")
    if error is not None and error.startswith("the sandbox failed"):
        signs.append(error)
    # Where files lie on the host's disk, the warden ends what writes too much.
    if error not in attack.get("error", [error]) and not (tier == "landlock" and error == "disk"):
        signs.append(f"ended as {error}")
    return [f"{attack['id']} {attack['category']}: {sign}" for sign in signs]


def left_over(host_side: psutil.Process) -> list[psutil.Process]:
    """Return the processes of a sandbox that still live, without the zygote; the kernel may need a moment."""
    deadline = time.monotonic() + SLACK_S
    while len(processes := host_side.children(recursive=True)) > 1 and time.monotonic() < deadline:
        time.sleep(0.002)
    return processes[1:]
