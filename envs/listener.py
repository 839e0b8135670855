"""The sockets that servers of ours listen at."""

import socket


def listen(host: str, port: int) -> socket.socket:
    """Of this address; port 0 is any that is free. Raises OSError, and OverflowError for a number that is no port.

    What its connections are given to send leaves at once. asyncio asks for that only where a socket says that it is
    TCP's, which one of the standard library does not; without it the second part of a reply waits for the client's
    acknowledgement of the first, 40 ms on Linux.
    """
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
