"""Offline search."""

import statistics
import time

import pytest

from envs.datasets.families import build_catalogue, catalogue_passages
from envs.tools.search import (
    MAX_LATENCY_S,
    MAX_QUERY_CHARS,
    NO_RESULTS,
    OfflineSearchTool,
    PassageIndex,
    simulated_latency_s,
)

PASSAGES = (
    "One crate of copper bolts weighs 47 kg.",
    "One crate of copper rings weighs 12 kg.",
    "One crate of cedar planks weighs 30 kg.",
)


async def search(query, passages=PASSAGES, **settings):
    return await OfflineSearchTool(passages, **settings).call(query)


async def test_the_passage_with_most_of_the_words_is_first():
    assert PassageIndex(PASSAGES).find("copper rings", 3) == [PASSAGES[1], PASSAGES[0]]
    assert (await search("What does one crate of CEDAR planks weigh?")).text == PASSAGES[2]


@pytest.mark.parametrize("query", ["zebra", "!!!", "the of", "鉄", "\ud800", "\x00", "zebra " * MAX_QUERY_CHARS * 9])
async def test_a_query_without_a_match_has_no_results(query):
    result = await search(query)
    assert (result.text, result.error) == (NO_RESULTS, None)


async def test_number_and_length_of_results_are_bounded_and_an_empty_query_is_the_callers_error():
    assert (await search(" \n\t")).error == "empty_query"
    assert len(PassageIndex(PASSAGES).find("crate copper cedar", 2)) == 2
    assert len(PassageIndex(PASSAGES).find("copper", 50)) == 2
    assert len((await search("copper", ("copper " * 1000, "copper"), max_chars=100)).text) <= 100


async def test_every_item_of_the_catalogue_is_found_by_its_name():
    tool = OfflineSearchTool(catalogue_passages())
    for item in (item for half in build_catalogue().values() for item in (*half.items, *half.links)):
        assert (await tool.call(item.name)).text == item.passage
        assert (await tool.call(f"How many kg does one crate of {item.name} weigh?")).text == item.passage


# Simulated latency


def test_latency_has_its_median_a_heavy_tail_and_an_upper_bound():
    latencies = [simulated_latency_s(f"item {number}", 1.3) for number in range(4000)]
    assert 1.2 < statistics.median(latencies) < 1.4
    assert statistics.mean(latencies) > 1.25 * statistics.median(latencies)
    assert max(latencies) == MAX_LATENCY_S


async def test_search_takes_the_latency_of_its_query_and_finds_the_same():
    assert simulated_latency_s("wool locks", 1.3) == simulated_latency_s("wool locks", 1.3)
    started = time.monotonic()
    slow = await search("copper rings", latency_s=0.05)
    assert time.monotonic() - started >= simulated_latency_s("copper rings", 0.05)
    assert slow == await search("copper rings")
