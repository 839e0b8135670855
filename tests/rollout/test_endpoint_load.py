"""The endpoint under hostile load: what other attempts of the worker notice of it."""

import asyncio
import resource
import sys
import time
from pathlib import Path

import pytest
from endpoint_play import RULES, new_attempt, new_client, user
from scripted import ScriptedEngine, ScriptedTokenizer, make_task

from configs.rollout import RolloutConfig
from rollout.agent.custom import CustomAgent
from rollout.chat import ChatFormat
from rollout.endpoint.server import Endpoint
from rollout.endpoint.writer import engine_writers

ATTACK = """
import http.client, json, socket, sys, threading, time
port, key, until = int(sys.argv[1]), sys.argv[2], time.monotonic() + float(sys.argv[3])
head = f"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\nx-api-key: {key}\\r\\n".encode()
HALF = [b"", b"POST /v1/chat", head, head + b"content-length: 900\\r\\n\\r\\n{", head + b"expect: 100-continue\\r\\n"]

def half(start):
    while time.monotonic() < until:
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.sendall(start)
            one.settimeout(until - time.monotonic() + 1)
            one.recv(1)

def post(pieces, size, length):
    headers = {"authorization": f"Bearer {key}"} | ({"content-length": str(size)} if length else {})
    while time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request("POST", "/v1/chat/completions", pieces(), headers, encode_chunked=not length)
            print(connection.getresponse().status)
        except OSError as error:
            print(type(error).__name__)
        connection.close()

def body(size):
    text = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x " * (size // 2)}]}).encode()
    return lambda: (text[at : at + 65536] for at in range(0, len(text), 65536)), len(text)

big = b" " * 65536
jobs = [(half, HALF[number % 5]) for number in range(100)]
jobs += [(post, lambda: (big for _ in range(3200)), 3200 * 65536, length) for length in (True, False)]
jobs += [(post, *body(size), True) for size in (20_000_000, 7_000_000, 300_000)]
threads = [threading.Thread(target=one, args=rest, daemon=True) for one, *rest in jobs]
for one in threads: one.start()
for one in threads: one.join(max(0, until + 2 - time.monotonic()))
"""


class SlowEngine(ScriptedEngine):
    """Replies after the time of a small model."""

    async def generate(self, request):
        self.texts = ["4"]
        await asyncio.sleep(0.1)
        return await super().generate(request)


async def latencies(endpoint, seconds):
    async def ask(number):
        attempt = new_attempt(SlowEngine([]), RULES, trajectory_id=f"g/{number}")
        endpoint.admit(attempt)
        async with new_client(endpoint, api_key=attempt.key) as client:
            for _ in range(RULES.max_calls):
                started = time.perf_counter()
                await client.chat.completions.create(model="policy", messages=[user("2+2?")])
                taken.append(time.perf_counter() - started)
        endpoint.dismiss(attempt)
        await attempt.end()

    taken, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.gather(*map(ask, range(4)))
    return sorted(taken)[int(0.95 * len(taken))]


async def never_stops_asking(task, attempt, endpoint):
    async with new_client(endpoint, api_key=attempt.key) as client:
        while True:
            try:
                await client.chat.completions.create(model="policy", messages=[user("again")])
            except Exception:
                continue


@pytest.mark.slow
async def test_other_attempts_hardly_notice_hostile_connections_bodies_texts_and_loops(capsys):
    endpoint, chat = Endpoint(), ChatFormat(ScriptedTokenizer())
    writers = engine_writers(SlowEngine([]), 0.7)
    looping = CustomAgent(never_stops_asking, endpoint, writer=writers, chat=chat, rules=RULES, limits=RolloutConfig())
    victim = new_attempt(SlowEngine([]), trajectory_id="g/hostile")
    endpoint.admit(victim)
    await latencies(endpoint, 1)
    peak_bytes()
    quiet, before = await latencies(endpoint, 5), peak_bytes()
    port = endpoint.base_url.rpartition(":")[2].partition("/")[0]
    command = (sys.executable, "-c", ATTACK, port, victim.key, "12")
    attack = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await asyncio.sleep(1)
    loops = asyncio.ensure_future(looping.run(make_task(), trajectory_id="l", group_id="l"))
    loaded = await latencies(endpoint, 10)
    trajectory, grown = await loops, peak_bytes() - before
    told, _ = await attack.communicate()
    with capsys.disabled():
        print(f"\np95 {quiet:.3f} s quiet, {loaded:.3f} s loaded; +{grown >> 20} MiB")
    assert loaded < 2 * quiet
    assert grown < 500e6
    assert (trajectory.stop_reason, len(trajectory.turns)) == ("calls", RULES.max_calls)
    assert b"413" in told.split()
    endpoint.close()


def peak_bytes():
    """Return the most memory that this process had since the last call."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    Path("/proc/self/clear_refs").write_text("5")
    return peak
