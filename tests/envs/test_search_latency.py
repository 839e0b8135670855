"""The simulated latency of the offline search tool."""

import statistics
import time

from envs.tools.search import MAX_LATENCY_S, OfflineSearchTool, simulated_latency_s


def test_latency_has_its_median_a_heavy_tail_and_an_upper_bound():
    latencies = [simulated_latency_s(f"item {number}", 1.3) for number in range(4000)]
    assert 1.2 < statistics.median(latencies) < 1.4
    assert statistics.mean(latencies) > 1.25 * statistics.median(latencies)
    assert max(latencies) == MAX_LATENCY_S


def test_same_query_takes_equally_long_and_another_does_not():
    assert simulated_latency_s("wool locks", 1.3) == simulated_latency_s("wool locks", 1.3)
    assert simulated_latency_s("wool locks", 1.3) != simulated_latency_s("wool clocks", 1.3)


async def test_search_takes_its_latency_and_finds_the_same():
    passages = ["A crate of wool locks weighs 12 kg."]
    started = time.monotonic()
    slow = await OfflineSearchTool(passages, latency_s=0.05).call("wool locks")
    assert time.monotonic() - started >= simulated_latency_s("wool locks", 0.05)
    assert slow == await OfflineSearchTool(passages).call("wool locks")
