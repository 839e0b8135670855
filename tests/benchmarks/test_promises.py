from pathlib import Path

from benchmarks import promises

ROOT = Path(__file__).parents[2]


def test_every_promise_says_a_sentence_and_names_the_page_that_makes_it():
    found = promises.all_promises().values()
    assert found
    for promise in found:
        assert promise.said[0].isupper(), promise.name
        assert (ROOT / promise.where).is_file(), promise.name


def test_measurement_that_fails_is_a_promise_that_does_not_hold(monkeypatch, capsys):
    monkeypatch.setattr(promises, "measured", lambda promise, seed: promises.Measured("told", holds=seed == 0))
    name = next(iter(promises.all_promises()))
    assert (promises.main(["--only", name]), promises.main(["--only", name, "--seed", "1"])) == (0, 1)
    assert f"1 does not hold: {name}" in capsys.readouterr().out


def test_error_of_a_measurement_is_its_result():
    def broken(seed):
        raise RuntimeError("no such thing")

    promise = promises.Promise(name="unknown", said="Said", where="README.md", measure=broken)
    assert promises.measured(promise, 0).holds is False
