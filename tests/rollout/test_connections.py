"""Connections of the endpoint: each has its time, their number is bounded, and none outlives its attempt."""

import asyncio
import errno
import json

import pytest
from endpoint_play import GatedEngine, play, until, user

from rollout.endpoint import connections

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer KEY\r\n"
HALVES = {
    "nothing": "",
    "half a line": "POST /v1/ch",
    "half a header": HEAD,
    "no body": HEAD + "content-length: 9\r\n\r\n",
    "half a body": HEAD + "content-length: 9\r\n\r\n{",
    "half a chunk": HEAD + "transfer-encoding: chunked\r\n\r\n5\r\n{",
    "half a second request": "GET /v1/models HTTP/1.1\r\nhost: x\r\nx-api-key: KEY\r\n\r\n|GET",
}


async def opened(p, text=""):
    port = int(p.endpoint.base_url.rpartition(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.replace("KEY", p.attempt.key).encode())
    return reader, writer


async def closed(reader):
    async with asyncio.timeout(60):
        try:
            while await reader.read(9999):
                pass
        except ConnectionError:
            pass


@pytest.mark.parametrize("half", HALVES)
async def test_a_request_that_does_not_arrive_is_not_waited_for(half, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)
    async with play("a") as p:
        before, _, text = HALVES[half].rpartition("|")
        reader, writer = await opened(p, before or text)
        if before:
            await reader.readuntil(b"policy")
            writer.write(text.encode())
        await closed(reader)
        writer.close()
        monkeypatch.undo()
        assert (await p.ask(user("1"))).choices[0].message.content == "a"


async def test_a_request_that_arrived_may_wait_for_its_reply(monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", 0.1)
    async with play(engine=GatedEngine(["a"])) as p:
        asked = asyncio.ensure_future(p.ask(user("1")))
        await until(lambda: p.engine.requests)
        await asyncio.sleep(0.3)
        p.engine.gate.set()
        assert (await asked).choices[0].message.content == "a"


async def test_at_the_limit_the_connection_without_a_request_makes_room(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    async with play(engine=GatedEngine(["a", "b"])) as p:
        asked = asyncio.ensure_future(p.ask(user("1")))
        await until(lambda: p.engine.requests)
        idle = [await opened(p) for _ in range(9)]
        async with p.client_with() as other:
            later = asyncio.ensure_future(other.models.list())
            assert [one.id for one in (await later).data] == ["policy"]
            assert len(p.endpoint._state.connections) <= 3
            p.engine.gate.set()
            assert (await asked).choices[0].message.content == "a"
        for _, writer in idle:
            writer.close()


async def test_connections_of_an_attempt_end_with_it_and_those_of_others_stay(monkeypatch):
    monkeypatch.setattr(connections, "CLOSING_S", 0.01)
    async with play("a") as p, play("b") as other:
        for one in (p, other):
            await one.ask(user("1"))
        p.endpoint.dismiss(p.attempt)
        await until(lambda: not p.endpoint._state.connections)
        assert len(other.endpoint._state.connections) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_open_call_is_told_the_end_of_its_attempt_and_nothing_is_left_or_logged(stream, caplog):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with play(engine=GatedEngine(["a"])) as p:
        body = json.dumps({"model": "policy", "stream": stream, "messages": [user("1")]})
        reader, writer = await opened(p, f"{HEAD}content-length: {len(body)}\r\n\r\n{body}")
        await until(lambda: p.engine.requests)
        p.endpoint.dismiss(p.attempt)
        await p.attempt.end()
        async with asyncio.timeout(60):
            assert b"attempt_ended" in await reader.read()
        writer.close()
    assert told == []
    assert "Traceback" not in caplog.text


async def test_a_process_without_descriptors_accepts_again_later_and_logs_a_line(monkeypatch, caplog):
    monkeypatch.setattr(connections, "RETRY_S", 0.01)
    loop, failing = asyncio.get_running_loop(), iter(range(3))
    accept = loop.sock_accept

    async def sock_accept(listening):
        if next(failing, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return await accept(listening)

    monkeypatch.setattr(loop, "sock_accept", sock_accept)
    async with play("a") as p:
        assert (await p.ask(user("1"))).choices[0].message.content == "a"
    lines = [one for one in caplog.records if one.name == connections.__name__]
    assert len(lines) == 3
    assert not any(one.exc_info for one in lines)
