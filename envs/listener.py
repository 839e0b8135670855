"""The sockets that servers of ours listen at."""

import socket

from configs.errors import UserError

LOOPBACK = "127.0.0.1"


class ListenError(UserError):
    """Nothing can listen at an address."""


def listen(host: str, port: int) -> socket.socket:
    """At this address; port 0 is any that is free. Raises ListenError where it cannot be had.

    What its connections are given to send leaves at once. asyncio asks for that only where a socket says that it is
    TCP's, which one of the standard library does not; without it the second part of a reply waits for the client's
    acknowledgement of the first, 40 ms on Linux.
    """
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ListenError(f"cannot listen on {host} port {port}: {reason}; choose another --port, 0 for any") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
