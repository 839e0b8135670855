"""A Ray whose actors do what a test says, in the process of the test."""

from types import SimpleNamespace

import ray

from actors.cluster import CutOffError
from rollout.engines.engine import Pulse


class Ref:
    """A call: pending until it has a value or an error."""

    def __init__(self):
        self.done, self.value, self.error = False, None, None

    def resolve(self, value=None):
        self.done, self.value = True, value

    def fail(self, error):
        self.done, self.error = True, error


class FakeActor:
    """Records its calls. Heartbeats are answered with `pulse` while it is neither dead nor hung."""

    def __init__(self, name=""):
        self.name, self.pulse, self.is_hung, self.is_killed = name, Pulse(), False, False
        self.calls = []

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *args, **kwargs: self._call(method, args))

    def _call(self, method, args):
        ref = Ref()
        self.calls.append((method, args, ref))
        if method == "heartbeat" and not self.is_hung and not self.is_killed:
            ref.resolve(self.pulse)
        if method in ("release", "close"):
            ref.resolve()
        return ref

    def named(self, method):
        """The references of this method's calls."""
        return [ref for name, _, ref in self.calls if name == method]

    def die(self, error=None):
        """All calls that wait fail."""
        self.is_killed = True
        for *_, ref in self.calls:
            if not ref.done:
                ref.fail(error or ray.exceptions.ActorDiedError())


class FakeRay:
    """The functions of Ray that the supervisor calls."""

    exceptions = ray.exceptions

    def __init__(self):
        self.alive_nodes = {"n0"}

    def wait(self, refs, *, num_returns=1, timeout=None):
        done = [ref for ref in refs if ref.done]
        return done, [ref for ref in refs if not ref.done]

    def get(self, refs):
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        if refs.error:
            raise refs.error
        return refs.value

    def put(self, value):
        return value

    def kill(self, actor):
        actor.die()

    def nodes(self):
        return [{"NodeID": node, "Alive": True} for node in self.alive_nodes]


class FakeLauncher:
    """Starts workers on node n0 for all indices that have room."""

    def __init__(self):
        self.room, self.started, self.freed = set(range(100)), [], []
        self.learner_errors = []
        self.prms = []

    def reserve_workers(self, indices):
        pass

    def with_room(self, indices):
        return [index for index in indices if index in self.room]

    def start_worker(self, index, sampling, prm):
        self.started.append(FakeActor(f"worker {index}"))
        return self.started[-1], "n0"

    def free_worker(self, index):
        self.freed.append(index)

    def start_learner(self):
        return (FakeActor("learner"),)

    def wait_for_learner(self):
        if self.learner_errors:
            raise self.learner_errors.pop()

    def start_prm(self):
        self.prms.append(FakeActor("PRM"))
        return self.prms[-1]

    def no_room(self, name, claims):
        return CutOffError(f"no room for the {name}")
