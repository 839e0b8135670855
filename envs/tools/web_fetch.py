"""Fetching of a web page that a model or a web site named. Neither is trusted."""

import asyncio
import codecs
import contextlib
import ipaddress
import re
import socket
import zlib
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any

import httpcore
import httpx
import webencodings

from envs.tools.guard import BlockList
from envs.tools.http import USER_AGENT, Attempts, RefusedError, RequestError, ServiceLimits, is_passing, tls_context
from envs.types import ToolUnavailableError

PORTS = (80, 443, 8080, 8443)
MAX_URL_CHARS = 2000
MAX_REDIRECTS = 5
CONNECT_S = 5.0

_DETECTED_BYTES = 50_000
# Some of Python's codecs do not produce text, and some take quadratic time.
_WEB_CODECS = (
    *("utf-8", "utf-16", "iso8859", "cp125", "cp866", "cp874", "koi8", "mac-roman", "mac-cyrillic"),
    *("cp932", "euc_jp", "iso2022_jp", "cp949", "gb18030", "big5hkscs"),
)
_BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_BE: "utf-16-be", codecs.BOM_UTF16_LE: "utf-16-le"}
_META = re.compile(rb"<(?:meta|\?xml)\b[^>]*?(?:charset|encoding)\s*=\s*[\"']?\s*([\w:.-]+)", re.IGNORECASE)
_REDIRECTS = (301, 302, 303, 307, 308)
_TEXT_TYPES = ("application/xhtml+xml", "application/json", "application/xml")
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_HEADERS: dict[bytes | str, bytes | str] = {
    "User-Agent": USER_AGENT,
    "Accept": "text/html,text/plain;q=0.9,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "Connection": "close",
}
_INSIDE = tuple(
    ipaddress.ip_network(network)
    for network in (
        "168.63.129.16/32",  # Looks public, but is the metadata service of one cloud.
        "192.0.0.0/24",
        "192.88.99.0/24",
        "64:ff9b:1::/48",
        "fec0::/10",
        "3fff::/20",  # For documentation; unknown to Python 3.11.
    )
)
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A name service, like `resolve`."""


def decode_body(body: bytes, charset: str) -> str:
    """Decode as browsers do: by the byte order mark, the declared charset or the page's own, else UTF-8 or a guess."""
    for mark, name in _BOMS.items():
        if body.startswith(mark):
            return body[len(mark) :].decode(name, errors="replace")
    named = _META.search(body[:1024])
    declared = _codec_of(charset or (named[1].decode("ascii", "replace") if named else ""))
    if not charset and declared.startswith("utf-16"):
        declared = "utf-8"  # the page could not have named it in ASCII
    for name in filter(None, (declared, "utf-8")):
        with contextlib.suppress(ValueError):  # UnicodeDecodeError is one, too
            # Incremental, because the size limit may have cut the last character.
            return codecs.getincrementaldecoder(name)().decode(body)
    if declared not in ("", "utf-8"):
        return body.decode(declared, errors="replace")
    from charset_normalizer import from_bytes

    best = from_bytes(body[:_DETECTED_BYTES]).best()
    return body.decode((best and _codec_of(best.encoding)) or "utf-8", errors="replace")


def _codec_of(label: str) -> str:
    """Return the codec of a label as browsers understand it, or of Python's name for one; empty for any other."""
    label = label.strip("\t\n\f\r \"'")
    with contextlib.suppress(LookupError, ValueError):  # ValueError: the label holds a null
        found = webencodings.lookup(label) or webencodings.lookup(codecs.lookup(label).name.replace("_", "-"))
        # Some of these encodings are no codecs, such as `replacement`.
        name = codecs.lookup(found.codec_info.name if found else label).name
        # Browsers read GBK as its extension.
        return "gb18030" if name == "gbk" else name if name.startswith(_WEB_CODECS) else ""
    return ""


async def read_body(chunks: AsyncIterable[bytes], coding: str, max_bytes: int) -> tuple[bytes, bool]:
    """Return the decompressed body, and whether it was cut at `max_bytes`; raises RefusedError.

    No more than `max_bytes` are held in memory, however much the server sends and whatever it decompresses to.
    """
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise RefusedError("encoding", "it is compressed in a way that is not supported")
    unpacker = zlib.decompressobj(_GZIP_OR_ZLIB) if coding not in ("", "identity") else None
    body = bytearray()
    num_read = 0
    async for chunk in chunks:
        num_read += len(chunk)
        try:
            body += unpacker.decompress(chunk, max_bytes + 1 - len(body)) if unpacker else chunk
        except zlib.error:
            raise RefusedError("encoding", "its compression is broken") from None
        # Count the compressed bytes too: an endless stream can decompress to nothing.
        if max(len(body), num_read) > max_bytes:
            return bytes(body[:max_bytes]), True
    if unpacker and num_read and not unpacker.eof:
        raise RefusedError("unreachable", "its server broke off within it", passing=True)
    return bytes(body), False


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host; raises RequestError, or RefusedError for an unknown host."""
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        if getattr(error, "errno", None) == socket.EAI_AGAIN:
            problem = f"no name server answered for {host}; check this machine's network"
            raise RequestError(problem, passing=True) from None
        raise RefusedError("unreachable", "there is no host of this name") from None
    return [str(info[4][0]) for info in addresses]


def is_public(text: str) -> bool:
    """Return whether an IP address belongs to the public internet, also the one that an IPv6 address embeds."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if address in _TRANSLATED:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    # A global address is not private, loopback, link-local or unspecified.
    inside = address.is_multicast or address.is_reserved or any(address in network for network in _INSIDE)
    return address.is_global and not inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A fetched page, cut if it was longer than the limit. Its declared type is in lower case, and may be empty."""

    media_type: str
    text: str
    cut: bool


class PageFetcher(Attempts):
    """Fetches pages from public addresses, and `allowed_hosts`, each "host:port", at any address and port.

    The time limit of a page covers redirects, attempts and pauses.
    """

    def __init__(
        self,
        limits: ServiceLimits,
        *,
        block_list: BlockList,
        allowed_hosts: Sequence[str] = (),
        resolve: Resolve = resolve,
    ) -> None:
        super().__init__(limits)
        self._block_list = block_list
        self._allowed_hosts = frozenset(_host_port(httpx.URL(f"http://{allowed}")) for allowed in allowed_hosts)
        self._backend = _CheckedBackend(self._allowed_hosts, resolve)

    async def fetch(self, url: str) -> Page:
        """Return a page; raises RefusedError without a readable one, ToolUnavailableError without a name server."""
        try:
            return await self.repeat(lambda: self._follow(url))
        except RefusedError:
            raise
        except RequestError as error:
            raise ToolUnavailableError(str(error)) from None
        except TimeoutError:
            raise RefusedError("timeout", f"it was not there within {self.limits.time_limit_s:g} s") from None

    async def _follow(self, url: str) -> Page:
        target = self._checked(url)
        for _ in range(MAX_REDIRECTS + 1):
            outcome = await self._get(target)
            if isinstance(outcome, Page):
                return outcome
            target = self._checked(outcome)
        raise RefusedError("redirects", f"it redirects more than {MAX_REDIRECTS} times")

    def _checked(self, address: str) -> httpx.URL:
        """Parse an address and check its form; the connection checks the IP addresses behind it."""
        try:
            url = httpx.URL(address[: MAX_URL_CHARS + 1])
        except (httpx.InvalidURL, ValueError):
            raise RefusedError("bad_url", "its address is not valid") from None
        if len(address) > MAX_URL_CHARS:
            raise RefusedError("bad_url", f"its address is longer than {MAX_URL_CHARS} characters")
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise RefusedError("bad_url", "its address does not begin with http:// or https:// and a host")
        if url.userinfo:
            raise RefusedError("bad_url", "its address holds a user name")
        if self._block_list.blocks_host(url.raw_host.decode()):
            raise RefusedError("blocked", "its host is on the block list")
        if _port(url) not in PORTS and _host_port(url) not in self._allowed_hosts:
            raise RefusedError("bad_url", f"port {_port(url)} is not one of {', '.join(map(str, PORTS))}")
        return url

    async def _get(self, url: httpx.URL) -> Page | str:
        """Return the page, or the address that it redirects to."""
        origin = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        extensions = {"timeout": {"connect": CONNECT_S}}
        try:
            async with (
                httpcore.AsyncConnectionPool(
                    ssl_context=tls_context(), network_backend=self._backend, max_keepalive_connections=0
                ) as pool,
                pool.stream("GET", origin, headers=_HEADERS, extensions=extensions) as response,
            ):
                return await self._page(url, response)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            problem = f"its server broke off ({type(error).__name__})"
            raise RefusedError("unreachable", problem, passing=True) from None

    async def _page(self, url: httpx.URL, response: httpcore.Response) -> Page | str:
        headers = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in response.headers[::-1]}
        location = headers.get("location", "")
        if response.status in _REDIRECTS and location:
            try:
                return str(url.join(location))
            except (httpx.InvalidURL, ValueError):
                raise RefusedError("bad_url", "it redirects to an address that is not valid") from None
        if response.status != 200:
            raise RefusedError(
                "status", f"its server answered with status {response.status}", passing=is_passing(response.status)
            )
        kind, charset = _media_type(headers.get("content-type", ""))
        if kind and not kind.startswith("text/") and kind not in _TEXT_TYPES:
            raise RefusedError("content_type", f"it is of type {kind[:60]}, not text")
        coding = headers.get("content-encoding", "").strip().lower()
        body, cut = await read_body(response.aiter_stream(), coding, self.limits.max_bytes)
        return Page(media_type=kind, text=decode_body(body, charset), cut=cut)


def _media_type(content_type: str) -> tuple[str, str]:
    """Return type and charset of a Content-Type header in lower case, empty if they cannot be read."""
    header = Message()
    header["Content-Type"] = content_type
    try:
        return (header.get_content_type() if content_type.strip() else ""), str(header.get_content_charset() or "")
    except (TypeError, ValueError):
        return "", ""


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to checked IP addresses only. TLS still compares the certificate with the host's name."""

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
        # One private address is enough to refuse: a name with both kinds is an attack.
        if f"{host}:{port}" not in self._allowed_hosts and not all(map(is_public, addresses)):
            raise RefusedError("address", "its host's address is not on the public internet")
        failure: Exception = RefusedError("unreachable", "there is no host of this name")
        for address in addresses:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


def _port(url: httpx.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def _host_port(url: httpx.URL) -> str:
    return f"{url.raw_host.decode()}:{_port(url)}"
