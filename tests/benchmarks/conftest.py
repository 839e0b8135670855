"""A guard against connections of other projects' libraries to other hosts."""

import socket

import pytest


@pytest.fixture(scope="module")
def foreign_connections():
    """Addresses other than loopback that a module's tests tried to reach; each attempt fails."""
    addresses = []

    def guarded(function, address_of):
        def call(*args, **options):
            address = address_of(*args)
            if address not in ("127.0.0.1", "localhost", None):
                addresses.append(address)
                raise OSError(f"a test tried to reach {address}")
            return function(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"OPENAI_API_KEY": "k", "LANGSMITH_TRACING": "true", "LANGSMITH_API_KEY": "k"}.items():
            patch.setenv(name, value)
        for name in ("connect", "connect_ex"):
            function = getattr(socket.socket, name)
            host_of = lambda _, address: address[0] if isinstance(address, tuple) else None  # noqa: E731
            patch.setattr(socket.socket, name, guarded(function, host_of))
        patch.setattr(socket, "getaddrinfo", guarded(socket.getaddrinfo, lambda host, *_: host))
        yield addresses
