"""A hostile web: every page that would harm the machine or the agent is refused or cut."""

import asyncio
import gzip
import itertools
import socket
import ssl
import time
import tracemalloc
import zlib
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from envs.tools import web_fetch
from envs.tools.guard import BlockList
from envs.tools.http import RefusedError, ServiceLimits
from envs.tools.search import WebSearchTool
from envs.tools.web_fetch import MAX_REDIRECTS, PageFetcher, decode_body, is_public
from envs.types import ToolUnavailableError
from tests.envs.local_server import Answer, LocalServer, serving

HTML = {"Content-Type": "text/html; charset=utf-8"}
LIMITS = ServiceLimits(
    max_bytes=100_000, max_attempts=1, first_pause_s=0.01, time_limit_s=3.0, requests_per_minute=60_000
)
PATIENT = replace(LIMITS, max_attempts=2)
GIB = 1 << 30


@contextmanager
def no_name_server(monkeypatch, times=1000):
    """The first lookups find none."""
    look_up, left = socket.getaddrinfo, [None] * times

    def busy(*asked, **how):
        if left:
            left.pop()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up(*asked, **how)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", busy)
        yield


class FakeFinder:
    async def find(self, query):
        raise AssertionError("no search was asked for")


def fetcher(server=None, limits=LIMITS, blocked=(), **settings):
    allowed = [server.host_port] if server else []
    return PageFetcher(limits, block_list=BlockList(blocked), allowed_hosts=allowed, **settings)


def web_search(pages, max_chars=2000):
    return WebSearchTool(pages, FakeFinder(), block_list=BlockList(), max_chars=max_chars)


async def read(server, path="/", question="copper", limits=LIMITS):
    """What the planner gets for `url: PAGE QUESTION`."""
    return await web_search(fetcher(server, limits)).call(f"url: {server.url}{path} {question}")


async def unknown(host, port):
    raise RefusedError("unreachable", "there is no such host")


async def refusal(url, **settings):
    with pytest.raises(RefusedError) as caught:
        await fetcher(**settings).fetch(url)
    return caught.value


NOT_PUBLIC = [
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "100.100.100.200"),
    *("169.254.169.254", "169.254.170.2", "168.63.129.16", "192.0.0.192", "192.0.2.1", "198.18.0.1", "224.0.0.1"),
    *("240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%lo", "fc00::1", "fd00:ec2::254", "fec0::1"),
    *("ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1"),
    *("2002:7f00:1::", "2002:a9fe:a9fe::", "2001:0:1:2:3:4:8000:fffe", "2001:db8::1", "3fff:fff::1"),
]


def test_public_addresses():
    assert [address for address in NOT_PUBLIC if is_public(address)] == []
    assert all(map(is_public, ["8.8.8.8", "93.184.215.14", "2606:4700::1111", "::ffff:8.8.8.8"]))


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "0", "[::1]", "[::]"),
        *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "169.254.169.254", "[fe80::1]", "10.0.0.1", "①②⑦.⓪.⓪.①"),
    ],
)
async def test_every_spelling_of_an_inner_address_is_refused(host):
    with serving(Answer(headers=HTML, body=b"secret")) as server:
        error = await refusal(f"http://{host}:8080/")
    assert error.category in ("address", "bad_url", "unreachable")
    assert server.requests == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    ("target", "category"),
    [
        ("http://localhost/", "address"),
        ("http://127.0.0.1:8080/admin", "address"),
        ("//127.0.0.1/", "address"),
        ("http://169.254.169.254/latest/meta-data/", "address"),
        ("http://[::ffff:169.254.169.254]/", "address"),
        ("http://[fe80::1]/", "address"),
        ("http://127.0.0.1:22/", "bad_url"),
        ("file:///etc/passwd", "bad_url"),
        ("gopher://127.0.0.1:70/", "bad_url"),
        ("http://user:word@example.org/", "bad_url"),
        ("http://" + "a" * 3000, "bad_url"),
        ("http://[::1/", "bad_url"),
        ("https:////[", "bad_url"),
    ],
)
async def test_a_redirect_to_an_inner_or_invalid_address_is_refused(status, target, category):
    with serving(Answer(status=status, headers={"Location": target})) as server:
        result = await read(server)
    assert result.error == category
    assert len(server.requests) == 1


async def test_an_invalid_internationalized_name_is_a_name_like_any_other():
    """Names of emoji are such names."""

    with serving(Answer(302, {"Location": "http://xn--a/"})) as server:
        for url in ("http://xn--a/", "http://xn--i-7iq.example/"):
            assert (await refusal(url, resolve=unknown)).category == "unreachable"

        async def local(host, port):
            return ["127.0.0.1"]

        assert (await refusal(server.url, server=server, resolve=local)).category == "address"


async def test_redirects_are_followed_to_a_page_but_not_round_in_circles():
    def answer(request):
        step = int(request.path.strip("/") or 0)
        return Answer(headers=HTML, body=b"<p>copper</p>") if step == 3 else Answer(302, {"Location": f"/{step + 1}"})

    with LocalServer(answer) as server:
        assert (await read(server)).text == "copper"
    with serving(Answer(302, {"Location": "/again"})) as server:
        result = await read(server)
    assert (result.error, len(server.requests)) == ("redirects", MAX_REDIRECTS + 1)


async def test_a_name_that_changes_its_address_after_the_check_gains_nothing():
    """The connection uses the checked address: the name is resolved once for each connection."""
    asked = []

    async def rebinding(host, port):
        asked.append(host)
        return ["192.0.2.1"] if len(asked) > 1 else ["127.0.0.1"]

    with serving(Answer(headers=HTML, body=b"<p>copper</p>")) as server:
        port = server.host_port.split(":")[1]
        pages = PageFetcher(
            LIMITS, block_list=BlockList(), allowed_hosts=[f"rebinding.example:{port}"], resolve=rebinding
        )
        await pages.fetch(f"http://rebinding.example:{port}/")
    assert asked == ["rebinding.example"]
    assert server.requests[0].headers["Host"] == f"rebinding.example:{port}"


async def test_a_name_with_one_inner_address_among_public_ones_is_refused():
    async def mixed(host, port):
        return ["8.8.8.8", "127.0.0.1"]

    assert (await refusal("http://mixed.example/", resolve=mixed)).category == "address"


async def test_a_dead_name_server_is_a_fault_and_one_that_is_busy_for_a_moment_is_asked_again(monkeypatch):
    with no_name_server(monkeypatch), pytest.raises(ToolUnavailableError):
        await fetcher(limits=PATIENT).fetch("http://somewhere.example/")
    with serving(Answer(headers=HTML, body=b"<p>copper</p>")) as server, no_name_server(monkeypatch, times=1):
        assert (await read(server, limits=PATIENT)).text == "copper"


async def test_an_allowed_server_opens_no_other_port_of_its_machine():
    with (
        serving(Answer(headers=HTML, body=b"inner")) as other,
        serving(Answer(302, {"Location": other.url})) as server,
    ):
        assert (await read(server)).error in ("address", "bad_url")
    assert other.requests == []


@pytest.mark.parametrize("blocked", ["bücher.example", "BÜCHER.example", "xn--bcher-kva.example"])
async def test_a_blocked_host_is_refused_in_every_spelling(blocked):
    for host in ("bücher.example", "www.xn--bcher-kva.example", "BÜCHER.example.", "a.b.bücher.example"):
        assert (await refusal(f"http://{host}/", blocked=[blocked])).category == "blocked"


async def test_a_page_of_a_gibibyte_is_cut_and_says_so():
    chunk = b"<p>Copper is a metal of reddish colour.</p>" * 1500
    endless = itertools.repeat(chunk, GIB // len(chunk))
    headers = HTML | {"Content-Length": str(GIB)}
    with serving(Answer(headers=headers, chunks=endless)) as server:
        result = await read(server)
    assert result.text.startswith("(page cut after 100000 bytes)\n")
    assert "Copper is a metal" in result.text
    assert server.sent < 20_000_000


async def test_a_page_that_trickles_for_ever_is_given_up_at_the_deadline():
    with serving(Answer(headers=HTML, chunks=itertools.repeat(b"<p>copper"), pause_s=0.02)) as server:
        result = await read(server, limits=replace(LIMITS, time_limit_s=0.5))
    assert result.error == "timeout"


async def silent(reader, writer):
    await asyncio.sleep(30)


async def endless_headers(reader, writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.is_closing():
        writer.write(b"X: " + b"y" * 1000 + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize(("serve", "category"), [(silent, "timeout"), (endless_headers, "unreachable")])
async def test_a_server_without_a_reply_is_given_up(serve, category):
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host_port = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pages = PageFetcher(replace(LIMITS, time_limit_s=0.5), block_list=BlockList(), allowed_hosts=[host_port])
    with pytest.raises(RefusedError) as caught:
        await pages.fetch(f"http://{host_port}/")
    assert caught.value.category == category
    server.close()


def bomb(num_mib, wbits):
    """Zeros, packed once and repeated: a full flush makes the packed pieces independent of one another."""
    packer = zlib.compressobj(9, zlib.DEFLATED, wbits)
    header = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    return header + (packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)) * num_mib


@pytest.mark.parametrize(("coding", "wbits"), [("gzip", 31), ("deflate", 15), ("X-GZIP", 31)])
async def test_a_bomb_of_a_gibibyte_is_unpacked_up_to_the_cap_only(coding, wbits):
    body = bomb(1024, wbits)
    with serving(Answer(headers=HTML | {"Content-Encoding": coding}, body=body)) as server:
        tracemalloc.start()
        result = await read(server)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert result.error == "no_text"
    assert "100000" in result.text
    assert peak < 30_000_000


async def test_a_compressed_stream_that_goes_on_and_becomes_nothing_is_cut():
    start = gzip.compress(b"")[:10]
    empty_block = zlib.compressobj(9, zlib.DEFLATED, -15).flush(zlib.Z_FULL_FLUSH)
    chunks = itertools.chain([start], itertools.repeat(empty_block * 1000))
    with serving(Answer(headers=HTML | {"Content-Encoding": "gzip"}, chunks=chunks)) as server:
        assert (await read(server)).error == "no_text"
    assert server.sent < 20_000_000


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/html; charset=utf-8", "<p>café über 中文</p>".encode("latin-1", "replace")),
        ("text/html; charset=latin-1", "<p>café</p>".encode("latin-1")),
        ("text/html; charset=utf-8", "<p>café</p>".encode("latin-1")),
        ("text/html; charset=no-such-charset", "<p>café</p>".encode()),
        ("text/html; charset=utf-16", "<p>café</p>".encode("utf-16")),
        ("text/html; charset=unicode_escape", b"<p>caf\\u00e9</p>"),
        ("text/html; charset=punycode", "<p>café</p>".encode()),
        ("text/html; charset=zip", "<p>café</p>".encode()),
        ("text/html; charset=utf-8", b"<p>caf\xff\xfe\xed\xa0\x80 \x00\x01\x1b[31m</p>"),
        ("text/html; charset=\x80\xff", "<p>café</p>".encode()),
        ("text/html", "<p>café</p>".encode("cp1252")),
        ("", "<p>café</p>".encode()),
        # Python fails to read these headers, with one error and with another.
        ("text/html; charset*=a; charset*0=b", "<p>café</p>".encode()),
        (f"text/html; x*{'9' * 5000}=a", "<p>café</p>".encode()),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_a_wrong_charset_gives_text_without_control_characters(content_type, body):
    with serving(Answer(headers={"Content-Type": content_type}, body=body)) as server:
        result = await read(server)
    assert result.error is None
    assert result.text.startswith("caf")
    assert not any(ord(char) < 32 and char not in "\n\t" for char in result.text)
    result.text.encode()


@pytest.mark.parametrize(
    ("label", "codec", "text"),
    [
        *((label, "cp1252", "“It’s” – 5 €") for label in ("iso-8859-1", " 'US-ASCII' ")),
        *(("x-sjis", "cp932", "第①章 髙橋さん"), ("csiso2022jp", "iso2022_jp", "日本"), ("euc-jp", "euc_jp", "日本")),
        *(
            ("ks_c_5601-1989", "cp949", "똠방각하는"),
            ("gb2312", "gb18030", "朱镕基"),
            ("x-x-big5", "big5hkscs", "香港㗎"),
        ),
        *(("iso-8859-9", "cp1254", "“ğ”"), ("tis-620", "cp874", "“ไทย”"), ("iso88592", "iso8859-2", "žluť")),
        *(("iso-8859-8-i", "iso8859-8", "שלום"), ("csiso88596e", "iso8859-6", "سلام"), ("866", "cp866", "привет")),
        *(("koi8-ru", "koi8-u", "привіт"), ("x-mac-roman", "mac-roman", "“é”"), ("unicode", "utf-16-le", "é")),
        *(("unicodefffe", "utf-16-be", "é"), ("x-unicode20utf8", "utf-8", "é"), ("latin_1", "cp1252", "“é”")),
        *((label, "utf-8", "é") for label in ("replacement", "iso-2022-kr", "x-user-defined", "utf_7", "a\0b")),
        *((label, codec, "é") for label, codec in (("shift_jis", "utf-8-sig"), ("utf-8", "utf-16"))),
    ],
)
def test_label_of_a_charset_is_read_as_browsers_do_and_a_byte_order_mark_wins(label, codec, text):
    assert decode_body(text.encode(codec), label) == text


def test_charset_may_stand_in_the_page_and_one_broken_byte_changes_no_other():
    page = "<meta http-equiv=Content-Type content='text/html; charset=Shift_JIS'>日本"
    assert decode_body(page.encode("cp932"), "") == page
    assert decode_body('<meta charset="utf-16">é'.encode(), "") == '<meta charset="utf-16">é'
    assert decode_body("하나".encode("cp949") + b"\xff" + "둘".encode("cp949"), "euc-kr") == "하나\ufffd둘"


async def test_a_character_that_the_cap_cuts_in_two_is_no_wrong_charset():
    with serving(Answer(headers={"Content-Type": "text/plain; charset=utf-8"}, body="é".encode() * 100)) as server:
        page = await fetcher(server, replace(LIMITS, max_bytes=101)).fetch(server.url)
    assert (page.text, page.cut) == ("é" * 50, True)


@pytest.mark.parametrize("kind", ["application/pdf", "image/png", "application/octet-stream", "video/mp4"])
async def test_what_is_not_text_is_refused_without_reading_it(kind):
    with serving(Answer(headers={"Content-Type": kind}, chunks=itertools.repeat(b"x" * 1000), pause_s=0.001)) as server:
        result = await read(server)
    assert result.error == "content_type"


@pytest.mark.parametrize("status", [204, 401, 404, 410, 500])
async def test_a_page_that_is_not_there_is_an_observation(status):
    with serving(Answer(status, HTML, b"" if status == 204 else b"sorry")) as server:
        result = await read(server)
    assert (result.error, f"status {status}" in result.text) == ("status", True)


@pytest.mark.parametrize(
    "page",
    [b"<div>" * 15_000, b"<" * 90_000, b"<p " + b"a=b " * 20_000, b"<table><tr><td>" * 6_000, b"&#x110000;" * 9_000],
)
async def test_markup_made_to_choke_a_parser_is_read_or_refused_in_time(page):
    with serving(Answer(headers=HTML, body=page)) as server:
        started = time.process_time()
        await read(server)
    assert time.process_time() - started < 5


async def test_cookies_and_credentials_are_never_sent():
    answers = iter([Answer(302, {"Location": "/b", "Set-Cookie": "a=b"}), Answer(headers=HTML, body=b"<p>copper</p>")])
    with LocalServer(lambda request: next(answers)) as server:
        await read(server)
    assert all(not {"Cookie", "Authorization", "Referer"} & set(request.headers) for request in server.requests)


def certificate(folder, name):
    """A self-signed one for `name`, and its key, as a file."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    signed = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False).sign(key, hashes.SHA256())
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / f"{name}.pem"
    path.write_bytes(key.private_bytes(*form) + signed.public_bytes(serialization.Encoding.PEM))
    return path


async def test_https_compares_the_certificate_with_the_name_and_not_with_the_checked_address(tmp_path, monkeypatch):
    path = certificate(tmp_path, "good.example")
    monkeypatch.setattr(web_fetch, "tls_context", lambda: ssl.create_default_context(cafile=path))
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(path)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 6\r\n\r\ncopper")
        await writer.drain()
        writer.close()

    async def here(host, port):
        return ["127.0.0.1"]

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=own)
    port = server.sockets[0].getsockname()[1]
    hosts = [f"good.example:{port}", f"other.example:{port}"]
    pages = PageFetcher(LIMITS, block_list=BlockList(), allowed_hosts=hosts, resolve=here)
    assert (await pages.fetch(f"https://good.example:{port}/")).text == "copper"
    with pytest.raises(RefusedError):
        await pages.fetch(f"https://other.example:{port}/")
    server.close()
