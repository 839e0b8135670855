"""Fetching a page that a model or a web site named: neither is trusted."""

import asyncio
import codecs
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any

import httpcore
import httpx

from envs.http import (
    USER_AGENT,
    Attempts,
    BrokenOffError,
    PassingError,
    ServiceLimits,
    UnreadableError,
    is_passing,
    read_body,
    retry_after_s,
    tls_context,
)
from envs.tools.guard import BlockList
from envs.types import ToolUnavailableError

_DETECTED_BYTES = 50_000
# Python knows more codecs than the web: some do not give text, and some take quadratic time.
_WEB_CODECS = ("utf-8", "utf-16", "ascii", "iso8859", "cp125", "cp932", "koi8", "shift_jis", "euc", "gb", "big5")


def media_type(content_type: str) -> tuple[str, str]:
    """Type and declared charset of a Content-Type header, in lower case; empty where none can be read."""
    header = Message()
    header["Content-Type"] = content_type
    try:
        return (header.get_content_type() if content_type.strip() else ""), str(header.get_content_charset() or "")
    except (TypeError, ValueError):
        return "", ""


def decode_body(body: bytes, charset: str) -> str:
    """Text in the declared charset, in UTF-8, or in whichever fits best; what fits none becomes U+FFFD."""
    for name in (charset, "utf-8"):
        codec = _codec(name)
        if codec is not None:
            try:
                # Incremental: a character that the cap cut in two is no error.
                return codec.incrementaldecoder("strict").decode(body)
            except UnicodeDecodeError:
                continue
    return body.decode(_detected(body), errors="replace")


def _codec(name: str) -> codecs.CodecInfo | None:
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError):
        return None
    return codec if codec.name.startswith(_WEB_CODECS) else None


def _detected(body: bytes) -> str:
    from charset_normalizer import from_bytes

    best = from_bytes(body[:_DETECTED_BYTES]).best()
    return best.encoding if best and _codec(best.encoding) else "utf-8"


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


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

PORTS = (80, 443, 8080, 8443)
MAX_URL_CHARS = 2000
MAX_REDIRECTS = 5
CONNECT_S = 5.0
_REDIRECTS = (301, 302, 303, 307, 308)
_TEXT_TYPES = ("application/xhtml+xml", "application/json", "application/xml")
_HEADERS: dict[bytes | str, bytes | str] = {
    "User-Agent": USER_AGENT,
    "Accept": "text/html,text/plain;q=0.9,*/*;q=0.1",
    "Accept-Encoding": "gzip, deflate",
    "Connection": "close",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """`url` is where the redirects ended, `media_type` is as declared, `cut` says that the page went on."""

    url: str
    media_type: str
    text: str
    cut: bool


class PageRefusedError(Exception):
    """No page, and nobody's fault but the page's or the caller's. `category` is one word for the result's error, the
    message a clause about the page."""

    def __init__(self, category: str, message: str) -> None:
        super().__init__(message)
        self.category = category


class PassingRefusalError(PageRefusedError, PassingError):
    """No page now; there may be one later, after `wait_s` at the soonest."""

    def __init__(self, category: str, message: str, *, wait_s: float = 0.0) -> None:
        super().__init__(category, message)
        self.wait_s = wait_s


class PageFetcher:
    """`limits` are those of one page, whose time covers redirects, attempts and pauses. `allowed_hosts`, each
    "host:port", may be at any address and port: somebody's own server."""

    def __init__(
        self,
        limits: ServiceLimits,
        *,
        block_list: BlockList,
        allowed_hosts: Sequence[str] = (),
        resolve: Resolve = resolve,
    ) -> None:
        self.limits = limits
        self._attempts = Attempts(limits)
        self._block_list = block_list
        self._allowed_hosts = frozenset(map(_as_asked, allowed_hosts))
        self._backend = _CheckedBackend(self._allowed_hosts, resolve)

    async def fetch(self, url: str) -> Page:
        """Raises PageRefusedError, and ToolUnavailableError where no name server answers."""
        try:
            return await self._attempts.ask(lambda: self._follow(url))
        except PageRefusedError:
            raise
        except NoNameServerError as error:
            raise ToolUnavailableError(str(error)) from None
        except PassingError:
            raise PageRefusedError("timeout", f"it was not there within {self.limits.time_limit_s:g} s") from None

    async def _follow(self, url: str) -> Page:
        target = self._checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            outcome = await self._get(target)
            if isinstance(outcome, Page):
                return outcome
            target = self._checked(outcome)
        raise PageRefusedError("redirects", f"it redirects more than {MAX_REDIRECTS} times")

    def _checked(self, address: str) -> httpx.URL:
        """The address as one that may be asked; where it leads is checked again by the connection."""
        try:
            url = httpx.URL(address[: MAX_URL_CHARS + 1])
        except (httpx.InvalidURL, ValueError):
            raise PageRefusedError("bad_url", "its address is not valid") from None
        if len(address) > MAX_URL_CHARS:
            raise PageRefusedError("bad_url", f"its address is longer than {MAX_URL_CHARS} characters")
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise PageRefusedError("bad_url", "its address does not begin with http:// or https:// and a host")
        if url.userinfo:
            raise PageRefusedError("bad_url", "its address holds a user name")
        if self._block_list.blocks_host(url.raw_host.decode()):
            raise PageRefusedError("blocked", "its host is on the block list")
        if _port(url) not in PORTS and _host_port(url) not in self._allowed_hosts:
            raise PageRefusedError("bad_url", f"port {_port(url)} is not one of {', '.join(map(str, PORTS))}")
        return url

    async def _get(self, url: httpx.URL) -> Page | str:
        """The page, or the address that it redirects to."""
        origin = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        try:
            async with (
                httpcore.AsyncConnectionPool(
                    ssl_context=tls_context(), network_backend=self._backend, max_keepalive_connections=0
                ) as pool,
                pool.stream(
                    "GET", origin, headers=_HEADERS, extensions={"timeout": {"connect": CONNECT_S}}
                ) as response,
            ):
                return await self._page(url, response)
        except UnreadableError as error:
            raise PageRefusedError("encoding", str(error)) from None
        except BrokenOffError:
            raise PassingRefusalError("unreachable", "its server broke off in the midst of a compressed page") from None
        except HostUnknownError:
            raise PageRefusedError("unreachable", "there is no host of this name") from None
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            raise PassingRefusalError("unreachable", f"its server broke off ({type(error).__name__})") from None

    async def _page(self, url: httpx.URL, response: httpcore.Response) -> Page | str:
        location = _header(response, b"location")
        if response.status in _REDIRECTS and location:
            return _joined(url, location)
        if response.status != 200:
            said = f"its server answered with status {response.status}"
            if is_passing(response.status):
                asked = _header(response, b"retry-after")
                raise PassingRefusalError("status", said, wait_s=retry_after_s(asked))
            raise PageRefusedError("status", said)
        kind, charset = media_type(_header(response, b"content-type"))
        if kind and not kind.startswith("text/") and kind not in _TEXT_TYPES:
            raise PageRefusedError("content_type", f"it is of type {kind[:60]}, not text")
        coding = _header(response, b"content-encoding").strip().lower()
        body, cut = await read_body(response.aiter_stream(), coding, self.limits.max_bytes)
        return Page(url=str(url), media_type=kind, text=decode_body(body, charset), cut=cut)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to checked addresses only. The name stays what TLS compares the certificate with."""

    def __init__(self, allowed_hosts: frozenset[str], resolve: Resolve) -> None:
        self._allowed_hosts = allowed_hosts
        self._resolve = resolve
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = list(dict.fromkeys(await self._resolve(host, port)))
        # One address of another kind is enough: a name that has both is made to slip through.
        if f"{host}:{port}" not in self._allowed_hosts and not all(map(is_public, addresses)):
            raise PageRefusedError("address", "its host's address is not on the public internet")
        for address in addresses[:-1]:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        if not addresses:
            raise HostUnknownError(host)
        return await self._network.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def connect_unix_socket(self, *_: object, **__: object) -> httpcore.AsyncNetworkStream:
        raise PageRefusedError("address", "its host is a socket of this machine")

    async def sleep(self, seconds: float) -> None:
        await self._network.sleep(seconds)


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _host_port(url: httpx.URL) -> str:
    return f"{url.raw_host.decode()}:{_port(url)}"


def _as_asked(allowed: str) -> str:
    """A server, "host:port", as an address that names it is compared; what no address can name is left as it is."""
    try:
        return _host_port(httpx.URL(f"http://{allowed}"))
    except httpx.InvalidURL:
        return allowed


def _header(response: httpcore.Response, name: bytes) -> str:
    found: bytes = next((value for key, value in response.headers if key.lower() == name), b"")
    return found.decode("latin-1")


def _joined(url: httpx.URL, location: str) -> str:
    try:
        return str(url.join(location))
    except (httpx.InvalidURL, ValueError):
        raise PageRefusedError("bad_url", "it redirects to an address that is not valid") from None
