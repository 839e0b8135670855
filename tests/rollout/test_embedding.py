import numpy as np
import pytest

from rollout.memory import DIMENSIONS, WordEmbedder

_UNRELATED = (
    "Find the number of primes below 100.",
    "What is the capital of France?",
    "Which enzyme breaks down starch in saliva?",
)


@pytest.fixture(scope="module")
def embedder():
    return WordEmbedder()


@pytest.mark.parametrize(
    ("question", "paraphrase"),
    [
        (
            "A truck carries 35 crates of wool locks. What is the load in kg?",
            "How many kilograms do the 35 crates of wool locks on a lorry weigh?",
        ),
        ("Who wrote the novel Middlemarch?", "Which author is Middlemarch by?"),
    ],
)
def test_a_paraphrase_is_closer_than_any_unrelated_question(embedder, question, paraphrase):
    asked, same, *others = (embedder.embed(text) for text in (question, paraphrase, *_UNRELATED))
    assert asked @ same > 0.5 > max(asked @ other for other in others) + 0.2


@pytest.mark.parametrize("text", ["", "\ud800", "\x00", "字" * 9000, "a" * 100_000])
def test_any_text_is_a_finite_vector_of_length_one_or_zero(embedder, text):
    vector = embedder.embed(text)
    assert vector.shape == (DIMENSIONS,)
    assert np.isclose(np.linalg.norm(vector), 1.0, atol=1e-5) or not vector.any()
