import pytest
import ray

from actors.weights import WeightStore
from learner.types import Adapter

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    yield
    ray.shutdown()


def make_adapter(version, data=b"weights"):
    return Adapter(policy_version=version, data=data, digest=f"digest of {data!r}")


def test_worker_gets_the_newest_version_with_its_digest():
    store = WeightStore.remote()
    ray.get(store.publish.remote(make_adapter(0)))
    ray.get(store.publish.remote(make_adapter(1, b"newer")))
    published = ray.get(store.wait_newer.remote(-1))
    assert published.policy_version == 1
    assert ray.get(published.ref[0]).data == b"newer"


def test_version_numbers_are_never_used_twice():
    store = WeightStore.remote()
    ray.get(store.publish.remote(make_adapter(3)))
    with pytest.raises(ValueError, match="published before"):
        ray.get(store.publish.remote(make_adapter(3)))


def test_worker_that_loaded_other_bytes_is_refused():
    store = WeightStore.remote()
    ray.get(store.publish.remote(make_adapter(0)))
    with pytest.raises(RuntimeError, match="worker 4 loaded"):
        ray.get(store.acknowledge.remote(4, 0, "another digest"))
    assert ray.get(store.counts.remote()) == (1, 0)


def test_acknowledged_version_is_counted():
    store = WeightStore.remote()
    adapter = make_adapter(0)
    ray.get(store.publish.remote(adapter))
    ray.get(store.acknowledge.remote(0, 0, adapter.digest))
    assert ray.get(store.counts.remote()) == (1, 1)
