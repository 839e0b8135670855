import asyncio
import hashlib

import pytest

from configs.loading import RECIPES
from learner.types import Adapter
from ray_jobs import cli
from ray_jobs.checks import doctor
from ray_jobs.checks import sync as sync_doctor
from ray_jobs.checks.sync import prove_sync
from rollout.engines.read_back import ReadBack
from rollout.store.canary import Canary
from rollout.types import Completion

TOKENS = tuple(range(11))
BASE = (-5.0,) * 10


def make_adapters():
    """Three versions whose canaries are a nat apart on every token, and further from the base model."""
    adapters = []
    for version in range(3):
        data = f"the weights of version {version}".encode()
        canary = Canary(token_ids=TOKENS, logprobs=(-1.0 - version,) * 10, base_logprobs=BASE)
        digest = hashlib.sha256(data).hexdigest()
        adapters.append(Adapter(policy_version=version, data=data, digest=digest, canary=canary))
    return adapters


class ScriptedEngine:
    """Says of the canary text what the learner says, but for rounding."""

    rounding = 0.05

    def __init__(self):
        self.policy_version = -1
        self.given = self.loaded = None
        self.said = {adapter.data: adapter.canary.logprobs for adapter in make_adapters()}
        self.released = []

    async def prepare_adapter(self, version, adapter):
        return version, adapter

    async def load_prepared(self, prepared):
        version, adapter = prepared
        self.check(version)
        self.policy_version = version
        self.given = adapter
        self.take_up(adapter)
        return self.digest(adapter)

    async def read_back(self):
        given, held = (hashlib.sha256(one or b"").hexdigest() for one in (self.given, self.held()))
        return ReadBack(given=given, held=held)

    def held(self):
        return self.loaded

    def check(self, version):
        if version <= self.policy_version:
            raise ValueError(f"adapter version {version} is not newer than {self.policy_version}")

    def take_up(self, adapter):
        self.loaded = adapter

    def digest(self, adapter):
        return hashlib.sha256(adapter).hexdigest()

    async def score(self, token_ids):
        assert tuple(token_ids) == TOKENS
        return [logprob + self.rounding for logprob in self.said.get(self.loaded, BASE)]

    async def generate(self, request):
        return Completion(
            token_ids=(1,), logprobs=(-1.0,), text="", finish_reason="length", policy_version=self.policy_version
        )

    def release(self, trajectory_id):
        self.released.append(trajectory_id)


class UnmovedEngine(ScriptedEngine):
    """Goes on with the base model whatever is loaded."""

    def take_up(self, adapter):
        pass


class DeafEngine(UnmovedEngine):
    """Its memory has the new weights, and is not what it computes with."""

    def held(self):
        return self.given


class LateEngine(ScriptedEngine):
    """Always one version behind, from its second on."""

    coming = None

    def take_up(self, adapter):
        self.loaded, self.coming = self.coming or adapter, adapter


class WrongEngine(ScriptedEngine):
    """Computes something else than the learner."""

    rounding = 0.4


class ForgivingEngine(ScriptedEngine):
    """Takes any number."""

    def check(self, version):
        pass


class CredulousEngine(ScriptedEngine):
    """Repeats the digest that it expects instead of looking at the bytes."""

    def digest(self, adapter):
        return make_adapters()[self.policy_version].digest


async def findings_of(engine, folder):
    return [finding async for finding in prove_sync(engine, make_adapters(), folder)]


def failed(findings):
    return [finding.what for finding in findings if finding.state == "fail"]


async def test_sound_sync_passes_and_every_line_says_what_was_planted(tmp_path):
    engine = ScriptedEngine()
    findings = await findings_of(engine, tmp_path)
    assert failed(findings) == []
    planted = [finding.what.removeprefix("planted: ") for finding in findings if finding.what.startswith("planted: ")]
    assert planted == [
        "the memory of version 0 in place of version 1",
        "the engine left on version 0",
        "the base model in place of version 1",
        "other weights under number 1, which is in use: engine",
        "other weights under number 1, which is in use: store",
        "a step back to number 0: engine",
        "a step back to number 0: store",
        "one bit of version 2 flipped on its way to the store",
        "one bit of version 2 flipped on its way, on disk",
        "one bit of version 2 flipped on its way to the engine",
    ]
    assert all(finding.found.startswith("caught: ") for finding in findings if finding.what.startswith("planted"))
    assert findings[1].found.startswith("weights read back: sha256 ")
    assert findings[2].found == "0.050 nats apart on average (bound 0.25)"
    assert [finding.what for finding in findings[-3:]] == [
        "from publishing version 1 to loaded",
        "from publishing version 1 to proven by the canary",
        "from publishing version 1 to the first token of a new request",
    ]
    assert all(finding.found.endswith(" s") for finding in findings[-3:])
    assert engine.released == ["doctor"] * 2


@pytest.mark.parametrize(
    ("engine", "lines"),
    [
        (
            UnmovedEngine,
            [
                "version 0: the engine's memory holds what it was given",
                "version 0: engine and learner agree on the canary text",
                "version 1: the engine's memory holds what it was given",
                "version 1: engine and learner agree on the canary text",
            ],
        ),
        (
            DeafEngine,
            [
                "version 0: engine and learner agree on the canary text",
                "version 1: engine and learner agree on the canary text",
            ],
        ),
        (
            LateEngine,
            [
                "version 1: the engine's memory holds what it was given",
                "version 1: engine and learner agree on the canary text",
            ],
        ),
        (
            WrongEngine,
            [
                "version 0: engine and learner agree on the canary text",
                "version 1: engine and learner agree on the canary text",
            ],
        ),
        (
            ForgivingEngine,
            [
                "planted: other weights under number 1, which is in use: engine",
                "planted: a step back to number 0: engine",
                "after these refusals: the engine still samples with version 1",
            ],
        ),
        (CredulousEngine, ["planted: one bit of version 2 flipped on its way to the engine"]),
    ],
)
async def test_engine_that_cannot_be_trusted_fails_the_line_that_names_why(engine, lines, tmp_path):
    assert failed(await findings_of(engine(), tmp_path)) == lines


async def test_canary_that_sees_nothing_fails_what_was_planted_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_doctor, "canary_fault", lambda now, before, published: None)
    findings = await findings_of(ScriptedEngine(), tmp_path)
    assert failed(findings) == [
        "planted: the engine left on version 0",
        "planted: the base model in place of version 1",
    ]
    assert {finding.found for finding in findings if finding.state == "fail"} == {"NOT caught"}


async def test_store_that_checks_nothing_fails_what_was_planted_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_doctor.AdapterStore, "read", lambda store, published: make_adapters()[0].data)
    found = failed(await findings_of(ScriptedEngine(), tmp_path))
    assert "version 1: the same bytes at learner, store and engine" in found
    assert "planted: one bit of version 2 flipped on its way, on disk" in found


def printed(findings, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code = doctor.show("weight sync", findings)
    return code, capsys.readouterr().out


def test_exit_code_is_that_of_the_worst_line(capsys, monkeypatch, tmp_path):
    sound = asyncio.run(findings_of(ScriptedEngine(), tmp_path / "sound"))
    code, table = printed(sound, capsys, monkeypatch)
    assert code == 0
    assert "planted: the engine left on version 0" in table
    assert "fail" not in table
    code, table = printed(asyncio.run(findings_of(LateEngine(), tmp_path / "late")), capsys, monkeypatch)
    assert code == 1
    assert table.count("fail") == 2


def test_doctor_takes_a_recipe_and_overrides_with_sync_and_neither_without(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("ray_jobs.run.preflight.check_before_acting", lambda config, draws_tasks: None)
    monkeypatch.setattr(sync_doctor, "run_sync_doctor", lambda config: asked.append(config) or 1)
    monkeypatch.setattr(doctor, "run_doctor", lambda: 0)
    recipe = str(RECIPES / "sync_cpu.toml")
    assert cli.main(["doctor"]) == 0
    for arguments in ([], [recipe], [recipe, "seed=3"], ["seed=3"]):
        assert cli.main(["doctor", "--sync", *arguments]) == 1
    assert [(config.name, config.seed) for config in asked] == [("demo", 0), ("sync", 0), ("sync", 3), ("demo", 3)]
    assert cli.main(["doctor", "seed=3"]) == 2
    assert "unrecognized arguments: seed=3" in capsys.readouterr().err


@pytest.mark.slow
def test_sync_of_the_demo_recipe_is_proven_for_real(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--sync"]) == 0
    table = capsys.readouterr().out
    assert "weight sync of 'demo', merged adapters" in table
    assert table.count("caught: ") == 10
    assert table.count("weights read back: sha256") == 2
