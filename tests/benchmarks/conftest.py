"""What the libraries of other projects do beside what they are asked for."""

import socket

import pytest


@pytest.fixture(scope="module")
def elsewhere():
    """Whom but loopback a module's tests asked for."""
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _only_loopback(getattr(socket.socket, name), asked))
        patch.setattr(socket, "getaddrinfo", _only_local_names(socket.getaddrinfo, asked))
        yield asked


def _only_loopback(connect, asked):
    def checked(self, address):
        if isinstance(address, tuple) and address[0] != "127.0.0.1":
            asked.append(address)
            raise OSError(f"a test asked for {address}")
        return connect(self, address)

    return checked


def _only_local_names(look_up, asked):
    def checked(host, *more, **options):
        if host not in ("127.0.0.1", "localhost", None):
            asked.append(host)
            raise OSError(f"a test asked for {host}")
        return look_up(host, *more, **options)

    return checked
