import hashlib
import shutil
import threading
import time

import pytest
import ray
from stage import PATIENCE_S, kill, make_config

from actors.store import StoreActor
from learner.types import Adapter
from rollout.buffer import WorkerStatus
from rollout.engines.read_back import ReadBack
from rollout.store.adapters import AdapterMismatchError
from rollout.store.lifecycle import NOTHING_TRAINED, GroupResult

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def only(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    store = StoreActor.remote(make_config(folder), folder)
    yield store
    ray.kill(store)


@pytest.fixture
def store(only):
    """As it starts in an empty folder. Its process, which takes seconds to start, is the same for all."""
    ray.get(only.__ray_call__.remote(begin_anew))
    return only


def begin_anew(store):
    folder = store._acks.parents[1]
    store._ledger.close()
    shutil.rmtree(folder)
    folder.mkdir()
    store.__init__(store._config, folder)


def make_adapter(version, data=b"weights"):
    return Adapter(policy_version=version, data=data, digest=hashlib.sha256(data).hexdigest())


def publish(store, *adapters):
    for adapter in adapters:
        ray.get(store.publish.remote(adapter))


def acknowledge(store, adapter, worker=0, *, held="same"):
    read_back = ReadBack(given="same", held=held)
    ray.get(store.acknowledge.remote(worker, adapter.policy_version, adapter.digest, read_back))


def test_worker_gets_the_newest_version_with_its_digest(store):
    publish(store, make_adapter(0), make_adapter(1, b"newer"))
    offer = ray.get(store.wait_newer.remote(-1))
    assert (offer.published.policy_version, offer.published.digest) == (1, make_adapter(1, b"newer").digest)
    assert ray.get(offer.ref[0]) == b"newer"


def test_who_waits_for_a_version_gets_it_once_it_is_published(store):
    publish(store, make_adapter(0))
    waiting = store.wait_newer.remote(0)
    assert ray.wait([waiting], timeout=0.5)[0] == []
    publish(store, make_adapter(1))
    assert ray.get(waiting).published.policy_version == 1


def test_calls_that_wait_keep_no_other_call_out(store):
    publish(store, make_adapter(0))
    # Nobody has proven version 9, so that none of them gets work.
    ray.get(store.rewind.remote(0, 9, NOTHING_TRAINED))
    newer = [store.wait_newer.remote(0) for _ in range(1200)]
    statuses = (WorkerStatus(worker=index, policy_version=0, running=(), free_places=1) for index in range(600))
    admitted = [store.admit.remote(status) for status in statuses]
    assert ray.get(store.next_version.remote(), timeout=PATIENCE_S) == 1
    ray.get(store.publish.remote(make_adapter(1)), timeout=PATIENCE_S)
    assert {offer.published.policy_version for offer in ray.get(newer, timeout=PATIENCE_S)} == {1}
    assert {admission.permits for admission in ray.get(admitted, timeout=PATIENCE_S)} == {()}


def test_version_is_published_while_other_calls_are_answered(store):
    """Its disk takes nothing before another call was answered."""
    ray.get(store.__ray_call__.remote(hold_up_publishing))
    published = store.publish.remote(make_adapter(0))
    newer = store.wait_newer.remote(-1)
    assert ray.get(store.next_version.remote(), timeout=PATIENCE_S) == 0
    assert ray.wait([published, newer], timeout=0.5)[0] == []
    ray.get(store.__ray_call__.remote(let_publishing_go_on))
    ray.get(published, timeout=PATIENCE_S)
    assert ray.get(newer, timeout=PATIENCE_S).published.policy_version == 0


def hold_up_publishing(store):
    gate, publish = threading.Event(), store._adapters.publish
    store.gate = gate
    store._adapters.publish = lambda *arguments: gate.wait(PATIENCE_S) and publish(*arguments)


def let_publishing_go_on(store):
    store.gate.set()


def test_bytes_that_were_just_published_are_not_read_again(store):
    ray.get(store.__ray_call__.remote(forbid_reading))
    publish(store, make_adapter(0))
    assert ray.get(ray.get(store.wait_newer.remote(-1)).ref[0]) == b"weights"


def forbid_reading(store):
    store._adapters.read = None


def test_batch_is_two_references_of_which_the_small_one_has_no_payloads(store):
    publish(store, make_adapter(0))
    status = WorkerStatus(worker=0, policy_version=0, running=(), free_places=2)
    for permit in ray.get(store.admit.remote(status)).permits:
        result = GroupResult(ending="ready", payload=b"%d" % permit.ordinal, versions={0: 5}, facts={"groups": 1.0})
        ray.get(store.complete.remote([(permit.lease, result)]))
    cut, payloads = store.next_batch.remote(1)
    batch = ray.get(cut)
    kill("store")
    assert (batch.step, batch.payloads, batch.facts) == (1, (), {"groups": 2.0})
    assert ray.get(payloads) == (b"0", b"1")


def test_version_numbers_are_never_used_twice(store):
    publish(store, make_adapter(3))
    with pytest.raises(ValueError, match="version 3 was published before; the next is 4"):
        publish(store, make_adapter(3, b"other"))
    with pytest.raises(ValueError, match="version 2 was published before"):
        publish(store, make_adapter(2))
    assert ray.get(store.next_version.remote()) == 4


def test_same_publication_twice_is_one(store):
    publish(store, make_adapter(0), make_adapter(0))
    assert ray.get(store.acknowledgements.remote()).num_published == 1


def test_bytes_that_are_not_what_the_digest_says_are_refused(store):
    with pytest.raises(ValueError, match="sha256"):
        publish(store, Adapter(policy_version=0, data=b"other", digest=make_adapter(0).digest))
    assert ray.get(store.next_version.remote()) == 0


def test_worker_that_loaded_other_bytes_is_refused(store):
    publish(store, make_adapter(0))
    with pytest.raises(AdapterMismatchError, match=r"worker 4 loaded .* as version 0, published was"):
        acknowledge(store, make_adapter(0, b"other"), worker=4)
    with pytest.raises(AdapterMismatchError, match="as version 7, published was nothing"):
        acknowledge(store, make_adapter(7))
    assert ray.get(store.acknowledgements.remote()).num_acknowledged == 0


def test_worker_whose_memory_holds_other_weights_is_refused(store):
    adapter = make_adapter(0)
    publish(store, adapter)
    with pytest.raises(AdapterMismatchError, match="worker 0, version 0: the engine's memory holds weights other"):
        acknowledge(store, adapter, held="other")
    assert ray.get(store.acknowledgements.remote()).num_acknowledged == 0


def test_version_that_a_worker_proved_is_counted_once_with_every_latency(store):
    adapter = make_adapter(0)
    publish(store, adapter)
    for worker in (0, 1):
        acknowledge(store, adapter, worker)
    found = ray.get(store.acknowledgements.remote())
    assert (found.num_published, found.num_acknowledged, len(found.latencies_s)) == (1, 1, 2)
    assert all(0 <= latency < 60 for latency in found.latencies_s)


def test_latency_of_a_version_that_is_proven_late_counts_from_its_own_publication(store):
    first = make_adapter(0)
    publish(store, first)
    time.sleep(0.3)
    publish(store, make_adapter(1, b"newer"))
    acknowledge(store, first)
    (latency_s,) = ray.get(store.acknowledgements.remote()).latencies_s
    assert latency_s >= 0.3


def test_worker_gets_work_once_it_has_proven_a_version(store):
    publish(store, make_adapter(0))
    status = WorkerStatus(worker=0, policy_version=-1, running=(), free_places=1)
    ray.get(store.rewind.remote(0, 3, NOTHING_TRAINED))
    waiting = store.admit.remote(status)
    assert ray.wait([waiting], timeout=0.5)[0] == []
    acknowledge(store, make_adapter(0))
    assert ray.wait([waiting], timeout=0.5)[0] == []
    publish(store, make_adapter(1))
    acknowledge(store, make_adapter(1))
    assert [permit.lease for permit in ray.get(waiting).permits] == [(0, 1)]


def test_killed_store_knows_its_versions_again_and_whoever_waited_is_answered(store):
    publish(store, make_adapter(0), make_adapter(1, b"newer"))
    acknowledge(store, make_adapter(1, b"newer"))
    waiting = store.wait_newer.remote(1)
    kill("store")
    offer = ray.get(store.wait_newer.remote(-1))
    assert ray.get(offer.ref[0]) == b"newer"
    with pytest.raises(ValueError, match="version 1 was published before"):
        publish(store, make_adapter(1, b"other"))
    publish(store, make_adapter(2, b"newest"))
    assert ray.get(ray.get(waiting).ref[0]) == b"newest"
    found = ray.get(store.acknowledgements.remote())
    assert (found.num_published, found.num_acknowledged) == (3, 1)


def test_killed_store_gives_the_same_work_to_a_worker_that_never_heard_of_it(store):
    publish(store, make_adapter(0))
    status = WorkerStatus(worker=0, policy_version=0, running=(), free_places=1)
    (permit,) = ray.get(store.admit.remote(status)).permits
    kill("store")
    assert ray.get(store.admit.remote(status)).permits == (permit,)


def test_result_that_comes_twice_counts_once_through_a_kill(store):
    publish(store, make_adapter(0))
    status = WorkerStatus(worker=0, policy_version=0, running=(), free_places=1)
    (permit,) = ray.get(store.admit.remote(status)).permits
    result = GroupResult(ending="ready", payload=b"group", versions={0: 5}, facts={"groups": 1.0})
    ray.get(store.complete.remote([(permit.lease, result)]))
    kill("store")
    ray.get(store.complete.remote([(permit.lease, result)]))
    counts, facts, _ = ray.get(store.totals.remote())
    assert (counts.drawn, counts.ready, facts) == (1, 1, {"groups": 1.0})
