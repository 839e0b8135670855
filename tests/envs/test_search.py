import pytest

from envs.datasets.families import build_catalogue
from envs.tools.search import MAX_QUERY_CHARS, NO_RESULTS, OfflineSearchTool
from envs.types import Tool

PASSAGES = (
    "One crate of copper bolts weighs 47 kg.",
    "One crate of copper rings weighs 12 kg.",
    "One crate of cedar planks weighs 30 kg.",
)


def search_tool(passages=PASSAGES, **settings) -> Tool:
    return OfflineSearchTool(passages, **settings)


async def test_the_passage_with_most_of_the_words_comes_first():
    result = await search_tool().call("copper rings")
    assert result.error is None
    assert result.text.splitlines() == [PASSAGES[1], PASSAGES[0]]


async def test_a_query_in_words_and_capitals_finds_the_same():
    result = await search_tool(max_results=1).call("What does one crate of CEDAR planks weigh?")
    assert result.text == PASSAGES[2]


@pytest.mark.parametrize("query", ["zebra", "!!!", "the of", "鉄", "\ud800", "\x00"])
async def test_a_query_that_matches_nothing_says_so(query):
    result = await search_tool().call(query)
    assert (result.text, result.error) == (NO_RESULTS, None)


@pytest.mark.parametrize("query", ["", " \n\t"])
async def test_an_empty_query_is_the_callers_error(query):
    assert (await search_tool().call(query)).error == "empty_query"


async def test_no_more_results_than_the_maximum_and_no_more_text_than_the_cap():
    assert len((await search_tool(max_results=2).call("crate copper cedar")).text.splitlines()) == 2
    long = search_tool(("copper " * 1000, "copper"), max_chars=100)
    assert len((await long.call("copper")).text) <= 100


async def test_more_results_than_passages_may_be_asked_for():
    assert len((await search_tool(max_results=50).call("copper")).text.splitlines()) == 2


async def test_an_endless_query_is_cut():
    query = "zebra " * MAX_QUERY_CHARS + "copper"
    assert (await search_tool().call(query * 1000)).text == NO_RESULTS


def test_everything_in_the_catalogue_is_found_first_by_its_name():
    catalogue = build_catalogue()
    tool = OfflineSearchTool(catalogue.passages)
    for item in (one for half in (catalogue.train, catalogue.eval) for one in (*half.items, *half.links)):
        assert tool.find(item.name)[0] == item.passage
        assert tool.find(f"How many kg does one crate of {item.name} weigh?")[0] == item.passage


def test_the_tool_introduces_itself_in_a_few_words():
    tool = search_tool()
    assert tool.name == "search"
    assert 5 <= len(tool.description.split()) <= 15
