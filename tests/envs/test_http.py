"""The HTTP client of the tools over local servers: retries, pace, bounds, and secrecy of the key."""

import asyncio
import json
import logging
import socket
import threading
import zlib

import pytest

from envs.tools.http import RefusedError, RequestError, Service, ServiceLimits
from envs.tools.web_fetch import read_body
from envs.types import ToolUnavailableError
from tests.envs.local_server import Answer, serving

KEY = "sk-secret-0123456789"


def answer(value, status=200, **headers):
    return Answer(status, headers, json.dumps(value).encode())


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The pauses between requests, which are not waited for."""
    sleep, waited = asyncio.sleep, []

    async def pause(seconds):
        waited.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", pause)
    return waited


def service_of(server, *, key="", **limits):
    chosen = ServiceLimits(**({"requests_per_minute": float("inf"), "time_limit_s": 1000} | limits))
    return Service("Service", server.url, chosen, key=key)


async def ask(server, **settings):
    service = service_of(server, **settings)
    return await service.ask(lambda: service.send("POST", "/x", body={"q": 1}))


async def failure(server, **settings):
    """Return the error of a single request."""
    with pytest.raises(RequestError) as caught:
        await service_of(server, **settings).send("POST", "/x", body={"q": 1})
    return caught.value


async def test_a_proxy_of_the_environment_is_used_only_for_other_machines(monkeypatch):
    with serving(answer("proxy")) as proxy, serving(answer("server")) as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        assert await ask(server, max_attempts=1) == "server"
        assert await Service("Judge", "http://judge.invalid", ServiceLimits(max_attempts=1)).send("GET", "/") == "proxy"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 503, 599])
async def test_a_passing_failure_is_retried_with_growing_pauses(status, pauses):
    with serving(answer({}, status)) as server, pytest.raises(ToolUnavailableError):
        await ask(server, max_attempts=4, first_pause_s=2.0)
    assert len(server.requests) == 4
    assert [low <= pause <= 1.5 * low for pause, low in zip(pauses, (2, 4, 8), strict=True)] == [True] * 3


@pytest.mark.parametrize("status", [301, 304, 400, 401, 404, 418])
async def test_a_refusal_is_not_retried(status):
    with serving(answer({} if status == 304 else {"error": "no"}, status)) as server:
        with pytest.raises(ToolUnavailableError):
            await ask(server)
        error = await failure(server)
    assert (error.status, error.passing, len(server.requests)) == (status, False, 2)


async def test_the_time_limit_covers_all_attempts():
    busy = Answer(503, {}, chunks=(b"a", b"b"), pause_s=0.1)
    with serving(busy) as server, pytest.raises(ToolUnavailableError, match=r"0\.3 s"):
        await ask(server, time_limit_s=0.3, first_pause_s=0.0, max_attempts=100)


async def test_a_reply_that_trickles_exceeds_the_limit_of_an_attempt():
    endless = Answer(chunks=(b" " for _ in range(100)), pause_s=0.05)
    with serving(endless) as server:
        assert (await failure(server, attempt_limit_s=0.2)).passing


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_a_reply_that_is_too_large_is_cut_off(status):
    with serving(Answer(status, body=b" " * 2_000_000)) as server:
        assert "100000" in str(await failure(server, max_bytes=100_000))


def packed(text, wbits):
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(text) + packer.flush()


async def in_chunks(body, size):
    for start in range(0, len(body), size):
        yield body[start : start + size]


PACKED = {
    "gzip": ("gzip", packed(b"copper is a metal", 31)),
    "gzip and padding": ("gzip", packed(b"copper is a metal", 31) + bytes(1000)),
    "gzip called deflate": ("deflate", packed(b"copper is a metal", 31)),
    "deflate": ("deflate", packed(b"copper is a metal", 15)),
}


@pytest.mark.parametrize(("coding", "body"), PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("size", [1, 20, 10_000])
async def test_a_compressed_body_is_read_in_chunks_of_any_size(coding, body, size):
    assert await read_body(in_chunks(body, size), coding, 2000) == (b"copper is a metal", False)


@pytest.mark.parametrize(("coding", "body"), PACKED.values(), ids=PACKED)
async def test_a_compressed_body_that_breaks_off_is_a_passing_failure(coding, body):
    length = len(body.rstrip(b"\0"))
    for size in (1, length // 2, length - 5):
        with pytest.raises(RefusedError) as caught:
            await read_body(in_chunks(body[:size], 7), coding, 2000)
        assert caught.value.passing
    assert await read_body(in_chunks(b"", 1), coding, 2000) == (b"", False)


async def test_a_body_is_cut_at_the_bound():
    whole, body = b"copper " * 10_000, packed(b"copper " * 10_000, 31)
    assert await read_body(in_chunks(body, 100), "gzip", 70_000) == (whole, False)
    assert await read_body(in_chunks(body, 100), "gzip", 69_999) == (whole[:69_999], True)


@pytest.mark.parametrize(
    ("coding", "body"), [("deflate", b"no"), ("gzip", b"no"), ("gzip", packed(b"x", -15)), ("br", b"x")]
)
async def test_broken_and_unsupported_compression_is_refused(coding, body):
    with pytest.raises(RefusedError) as caught:
        await read_body(in_chunks(body, 1), coding, 2000)
    assert not caught.value.passing


async def test_a_reply_that_breaks_off_is_requested_again():
    cut, whole = (Answer(200, {"Content-Length": "8"}, chunks=(part,)) for part in (b'{"a"', b'{"a": 1}'))
    with serving(cut, whole) as server:
        assert await ask(server, max_attempts=2) == {"a": 1}
    assert [json.loads(request.body) for request in server.requests] == [{"q": 1}] * 2


@pytest.mark.parametrize(
    "broken",
    [Answer(body=b"<html>"), Answer(body=b"[" * 100_000), Answer(200, {"Content-Encoding": "gzip"}, packed(b"{}", 31))],
    ids=["html", "deep", "compressed"],
)
async def test_an_unreadable_reply_is_not_requested_again(broken):
    with serving(broken) as server, pytest.raises(ToolUnavailableError):
        await ask(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [200, 400, 401, 500])
@pytest.mark.parametrize("form", ['{"error": {"message": KEY}}', '{"error": [{KEY: 1}]}', "KEY"])
async def test_the_key_is_in_no_reply_error_or_log_however_json_spells_it(status, form, caplog):
    caplog.set_level(logging.DEBUG)
    key = 'sk/secret+"0123'
    spelt = json.dumps(f"bad {key}").replace("/", r"\/").replace("+", r"\u002b")
    with serving(Answer(status, {}, form.replace("KEY", spelt).encode())) as server:
        try:
            seen = json.dumps(await ask(server, key=key, max_attempts=1))
        except ToolUnavailableError as error:
            seen = f"{error!r} {error.__cause__!r} {error.__context__!r}"
    assert "secret" not in seen + caplog.text
    assert server.requests[0].headers["Authorization"] == f"Bearer {key}"


async def test_an_error_of_the_connection_holds_nothing_of_the_request():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        service = Service("Service", url, ServiceLimits(attempt_limit_s=0.1), key=KEY)
        with pytest.raises(RequestError) as caught:
            await service.send("GET", "/")
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


async def test_requests_start_at_an_even_pace(pauses):
    with serving(answer({})) as server:
        service = service_of(server, requests_per_minute=6)
        await asyncio.gather(*(service.ask(lambda: service.send("GET", "/")) for _ in range(3)))
    assert [round(pause, -1) for pause in sorted(pauses)] == [10, 20]


def test_event_loops_of_several_threads_share_a_service():
    replies = []
    with serving(answer("there")) as server:
        service = service_of(server)
        threads = [
            threading.Thread(target=lambda: replies.append(asyncio.run(service.ask(lambda: service.send("GET", "/")))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert replies == ["there"] * 4
