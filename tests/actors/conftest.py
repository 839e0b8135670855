"""One Ray for the files that end none of its processes but those of their own actors."""

from collections.abc import Iterator

import pytest
import ray
from stage import local_ray

from actors.cluster import start_ray
from configs.run import ClusterConfig


@pytest.fixture(scope="package")
def shared_ray() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as env:
        # Ray would collect the numbers of its processes every ten seconds.
        env.setenv("RAY_metrics_report_interval_ms", "500")
        with local_ray():
            yield


@pytest.fixture(scope="module")
def cluster(shared_ray: None) -> None:
    """The shared Ray, started again where it is gone, as after a file that had a Ray of its own."""
    if not ray.is_initialized():
        start_ray(ClusterConfig())
