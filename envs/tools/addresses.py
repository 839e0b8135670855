"""Which network addresses a page may be fetched from: public ones, and no way around through an embedded one."""

import asyncio
import ipaddress
import socket

from envs.http import PassingError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_INSIDE = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Looks public, and is where one cloud's machines ask for their own secrets.
        "192.0.0.0/24",
        "192.88.99.0/24",
        "64:ff9b:1::/48",
        "fec0::/10",
        "3fff::/20",  # For documentation; Python 3.11 does not know it yet.
    )
)
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")


class HostUnknownError(ValueError):
    """No address belongs to this name."""


class NoNameServerError(PassingError):
    """Nobody says now which addresses belong to a name: this machine's network is down, or a name server is busy."""


async def resolve(host: str, port: int) -> list[str]:
    """The host's addresses, as the system knows them. Raises HostUnknownError and NoNameServerError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise NoNameServerError(f"no name server answered for {host}; check this machine's network") from None
        raise HostUnknownError(host) from None
    except UnicodeError:
        raise HostUnknownError(host) from None
    return [str(info[4][0]) for info in found]


def is_public(text: str) -> bool:
    """Whether an address is one of the open internet's: not loopback, link-local, private, shared, multicast, reserved
    or a cloud's metadata service, nor one that carries such an address inside."""
    address: Address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        inner = _embedded(address)
        if inner is not None:
            return is_public(str(inner))
    special = (
        address.is_private,
        address.is_loopback,
        address.is_link_local,
        address.is_multicast,
        address.is_reserved,
        address.is_unspecified,
        any(address in network for network in _INSIDE),
    )
    return address.is_global and not any(special)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address.teredo is not None:
        return address.teredo[1]
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
