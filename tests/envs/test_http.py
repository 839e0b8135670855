"""The one HTTP client over local servers; what its users make of it is tested with them."""

import asyncio
import gzip
import json
import logging
import socket
import threading
import zlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from envs.http import (
    BrokenOffError,
    PassingError,
    RefusedError,
    Service,
    ServiceLimits,
    SlowError,
    UnreachableError,
    UnreadableError,
    chat_completion,
    read_body,
)
from tests.envs.local_server import Answer, LocalServer

KEY = "sk-secret-0123456789"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def answer(value, status=200, **headers):
    return Answer(status, headers, json.dumps(value).encode())


def serving(*answers):
    """The last answer repeats."""
    left = list(answers)
    return LocalServer(lambda request: left.pop(0) if len(left) > 1 else left[0])


class Pauses(list):
    async def __call__(self, seconds):
        self.append(seconds)
        await asyncio.sleep(0)


def service_of(server, *, key="", pauses=None, **limits):
    chosen = ServiceLimits(**({"requests_per_minute": float("inf")} | limits))
    return Service(server.url, chosen, key=key, sleep=Pauses() if pauses is None else pauses)


async def ask(server, **settings):
    service = service_of(server, **settings)
    return await service.ask(lambda: service.send("POST", "/x", body={"q": 1}))


async def test_a_reply_is_the_json_value_and_an_empty_one_is_none():
    with serving(answer([1, {"a": None}]), Answer(204)) as server:
        assert [await ask(server), await ask(server)] == [[1, {"a": None}], None]
    assert json.loads(server.requests[0].body) == {"q": 1}


async def test_a_server_on_this_machine_is_asked_without_the_proxy_of_the_environment(monkeypatch):
    with serving(answer(1)) as server:
        monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid")
        assert await ask(server, max_attempts=1) == 1


async def test_any_other_server_is_asked_through_the_proxy_of_the_environment(monkeypatch):
    with serving(answer("the proxy's")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        service = Service("http://judge.invalid", ServiceLimits(max_attempts=1))
        assert await service.send("GET", "/x") == "the proxy's"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 503, 599])
async def test_what_may_pass_is_asked_again_with_growing_pauses(status):
    pauses = Pauses()
    with serving(answer({}, status)) as server, pytest.raises(PassingError, match=f"status {status}") as caught:
        await ask(server, pauses=pauses, max_attempts=4, first_pause_s=2.0)
    assert (len(server.requests), caught.value.attempts) == (4, 4)
    assert [low <= pause <= 1.5 * low for pause, low in zip(pauses, (2, 4, 8), strict=True)] == [True] * 3


@pytest.mark.parametrize("status", [301, 304, 400, 401, 404, 418])
async def test_a_refusal_is_not_asked_again_and_keeps_the_server_s_words_apart(status):
    body = {} if status == 304 else {"error": {"message": "not\nlike this"}}
    with serving(answer(body, status)) as server, pytest.raises(RefusedError) as caught:
        await ask(server)
    assert (str(caught.value), caught.value.status, len(server.requests)) == (f"status {status}", status, 1)
    assert status == 304 or caught.value.words == "not like this"


@pytest.mark.parametrize("asked", ["7", "7.0"])
async def test_the_pause_that_the_server_asks_for_is_kept(asked):
    pauses = Pauses()
    with serving(answer({}, 429, **{"Retry-After": asked}), answer("there")) as server:
        assert await ask(server, pauses=pauses, time_limit_s=None) == "there"
    assert pauses == [7.0]


async def test_a_pause_may_be_asked_for_as_a_date():
    pauses, then = Pauses(), format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    with serving(answer({}, 503, **{"Retry-After": then}), answer("there")) as server:
        await ask(server, pauses=pauses, time_limit_s=None)
    assert len(pauses) == 1
    assert 30 < pauses[0] <= 60


@pytest.mark.parametrize(("asked", "limit_s"), [("121", None), ("inf", None), ("31", 30.0)])
async def test_a_pause_beyond_the_bound_or_the_time_limit_is_not_waited_for(asked, limit_s):
    with serving(answer({}, 429, **{"Retry-After": asked})) as server, pytest.raises(PassingError, match="status 429"):
        await ask(server, time_limit_s=limit_s)
    assert len(server.requests) == 1


async def test_the_time_limit_covers_all_attempts():
    busy = Answer(503, {}, chunks=(b"a", b"b"), pause_s=0.1)
    with serving(busy) as server, pytest.raises(PassingError, match=r"no answer within 0\.3 s"):
        await ask(server, time_limit_s=0.3, first_pause_s=0.0, max_attempts=100)


async def test_a_reply_that_trickles_meets_the_limit_of_an_attempt():
    endless = Answer(chunks=(b" " for _ in range(100)), pause_s=0.05)
    with serving(endless) as server, pytest.raises(SlowError, match=r"no reply within 0\.2 s"):
        await ask(server, attempt_limit_s=0.2, max_attempts=1)


async def test_a_server_that_is_gone_is_told_apart():
    with serving(answer({})) as server:
        pass
    with pytest.raises(UnreachableError, match="no connection"):
        await ask(server, max_attempts=2)


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("compressed", [False, True])
async def test_a_reply_that_is_too_large_is_broken_off(status, compressed):
    body = b" " * 2_000_000
    large = Answer(
        status, {"Content-Encoding": "gzip"} if compressed else {}, gzip.compress(body, mtime=0) if compressed else body
    )
    with serving(large) as server, pytest.raises(UnreadableError, match=f"status {status} with more than 100000 bytes"):
        await ask(server, max_bytes=100_000)
    assert len(server.requests) == 1


async def test_a_compressed_reply_is_read():
    with serving(Answer(200, {"Content-Encoding": "gzip"}, gzip.compress(b'{"a": 1}', mtime=0))) as server:
        assert await ask(server) == {"a": 1}


def packed(text, wbits):
    packer = zlib.compressobj(wbits=wbits)
    return packer.compress(text) + packer.flush()


async def in_chunks(body, size):
    for start in range(0, len(body), size):
        yield body[start : start + size]


MEMBERS = [gzip.compress(b"copper ", mtime=0), gzip.compress(b""), gzip.compress(b"is a metal")]
PACKED = {
    "gzip of several members": ("gzip", b"".join(MEMBERS)),
    "gzip and padding": ("gzip", b"".join(MEMBERS) + bytes(1000)),
    "gzip called deflate": ("deflate", b"".join(MEMBERS)),
    "deflate": ("deflate", packed(b"copper is a metal", 15)),
    "bare deflate": ("deflate", packed(b"copper is a metal", -15)),
}


@pytest.mark.parametrize(("coding", "body"), PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("size", [1, 2, 20, 10_000])
async def test_a_body_is_unpacked_whole_as_servers_pack_it_and_however_it_arrives(coding, body, size):
    assert await read_body(in_chunks(body, size), coding, 2000) == (b"copper is a metal", False)


async def test_a_body_of_many_members_is_cut_at_the_bound():
    whole, body = b"copper " * 10_000, gzip.compress(b"copper " * 1000, mtime=0) * 10
    assert await read_body(in_chunks(body, 100), "gzip", 70_000) == (whole, False)
    assert await read_body(in_chunks(body, 100), "gzip", 69_999) == (whole[:69_999], True)


@pytest.mark.parametrize(
    ("coding", "body"), [("gzip", MEMBERS[0] + b"\x1f\x8bno"), ("deflate", b"no"), ("gzip", b"no")]
)
async def test_a_body_whose_compression_is_broken_is_refused_and_not_cut_short(coding, body):
    with pytest.raises(UnreadableError, match="its compression is broken"):
        await read_body(in_chunks(body, 1), coding, 2000)


@pytest.mark.parametrize(("coding", "body"), PACKED.values(), ids=PACKED)
async def test_a_body_that_ends_before_its_compression_does_is_refused_and_not_cut_short(coding, body):
    """Regression: what came of it was taken for the whole reply."""
    length = len(body.rstrip(b"\0"))
    for size in (1, length // 2, length - 5):
        with pytest.raises(BrokenOffError):
            await read_body(in_chunks(body[:size], 7), coding, 2000)
    assert await read_body(in_chunks(b"", 1), coding, 2000) == (b"", False)


async def test_a_reply_that_breaks_off_is_asked_for_again():
    body = gzip.compress(b'{"a": 1}', mtime=0)
    cut, whole = (Answer(200, {"Content-Encoding": "gzip"}, part) for part in (body[:-3], body))
    with serving(cut, whole) as server:
        assert await ask(server, max_attempts=2) == {"a": 1}
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "broken",
    [Answer(body=b"<html>"), Answer(body=b"[" * 100_000), Answer(200, {"Content-Encoding": "br"}, b"{}")],
    ids=["html", "deep", "br"],
)
@pytest.mark.parametrize(("again", "requests"), [(False, 1), (True, 2)])
async def test_what_cannot_be_read_is_asked_again_only_where_the_limits_say_so(broken, again, requests):
    with serving(broken) as server, pytest.raises(UnreadableError):
        await ask(server, retry_unreadable=again, max_attempts=2)
    assert len(server.requests) == requests


@pytest.mark.parametrize("status", [200, 400, 401, 500])
async def test_the_key_is_sent_and_comes_back_in_no_reply_error_or_log(status, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(answer({"error": f"bad key {KEY}"}, status)) as server:
        try:
            seen = str(await ask(server, key=KEY, max_attempts=1))
        except (PassingError, RefusedError) as error:
            seen = f"{error!r} {error.words} {error.__cause__!r} {error.__context__!r}"
    assert "bad key [key]" in seen
    assert KEY not in seen + caplog.text
    assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("form", ['{"error": {"message": KEY}}', '{"error": [{KEY: 1}]}', '{"detail": KEY}', "KEY"])
async def test_a_key_that_json_spells_otherwise_comes_back_in_no_reply_or_error(status, form):
    """Regression: it was replaced before the JSON was read, which then gave it whole."""
    key = 'sk/secret+"0123'
    spelt = json.dumps(f"bad {key}").replace("/", r"\/").replace("+", r"\u002b")
    with serving(Answer(status, {}, form.replace("KEY", spelt).encode())) as server:
        try:
            seen = json.dumps(await ask(server, key=key, max_attempts=1))
        except RefusedError as error:
            seen = error.words
    assert "bad [key]" in seen
    assert "secret" not in seen


async def test_nothing_of_the_request_hangs_on_an_error_of_the_connection():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        service = Service(
            f"http://127.0.0.1:{silent.getsockname()[1]}", ServiceLimits(attempt_limit_s=0.1, max_attempts=1), key=KEY
        )
        with pytest.raises(SlowError) as caught:
            await service.send("GET", "/")
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


async def test_requests_start_at_an_even_pace():
    pauses = Pauses()
    with serving(answer({})) as server:
        service = service_of(server, pauses=pauses, requests_per_minute=6)
        await asyncio.gather(*(service.ask(lambda: service.send("GET", "/")) for _ in range(3)))
    assert [round(pause, -1) for pause in sorted(pauses)] == [10, 20]


def test_threads_with_event_loops_of_their_own_share_a_service():
    replies = []
    with serving(answer("there")) as server:
        service = service_of(server)

        def ask_here():
            replies.append(asyncio.run(service.ask(lambda: service.send("GET", "/"))))

        threads = [threading.Thread(target=ask_here) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert replies == ["there"] * 4


async def test_a_local_server_is_reached_without_the_proxy_that_the_environment_excepts_it_from(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(answer("there")) as server:
        assert await ask(server) == "there"


async def test_what_an_attempt_raises_of_its_own_ends_the_question():
    async def attempt():
        raise KeyError("mine")

    with serving(answer({})) as server, pytest.raises(KeyError):
        await service_of(server).ask(attempt)


@pytest.mark.parametrize("usage", [None, [], {}, {"prompt_tokens": True, "completion_tokens": -1}])
def test_a_completion_without_usable_counts_has_none(usage):
    reply = {"choices": [{"message": {"content": None}}], "usage": usage}
    read = chat_completion(reply)
    assert (read.text, read.finish_reason, read.input_tokens, read.output_tokens) == ("", None, None, None)


@pytest.mark.parametrize(
    "reply", [None, [], "x", {}, {"choices": []}, {"choices": ["x"]}, {"choices": [{"message": 1}]}]
)
def test_what_is_no_completion_is_unreadable(reply):
    with pytest.raises(UnreadableError, match="without a chat completion"):
        chat_completion(reply)
