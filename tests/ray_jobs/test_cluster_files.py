"""The files in deploy/ hold what Ray and KubeRay take, and start what there is."""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

from configs.loading import load_run_config
from ray_jobs.cli import main

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RAYJOB = json.loads((Path(__file__).parent / "kuberay_rayjob.schema.json").read_text())["RayJob"]
"""See `$comment` in the file for where it is from."""
RAY_UP = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
CLUSTER = RAYJOB["properties"]["spec"]["properties"]["rayClusterSpec"]


def documents(name):
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / name).read_text())}


def rayjob():
    return documents("rayjob.yaml")["RayJob"]


def raycluster():
    return documents("raycluster-autoscaler.yaml")["RayCluster"]


def ray_up():
    return yaml.safe_load((DEPLOY / "ray-up.yaml").read_text())


def test_rayjob_is_what_kuberay_takes():
    assert rayjob()["apiVersion"] == "ray.io/v1"
    jsonschema.validate(rayjob(), RAYJOB)


def test_raycluster_is_what_kuberay_takes():
    assert raycluster()["apiVersion"] == "ray.io/v1"
    jsonschema.validate(raycluster()["spec"], CLUSTER)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda job: job["spec"].pop("rayClusterSpec") and job["spec"].update(rayClusterspec={}),
        lambda job: job["spec"].update(ttlSecondsAfterFinished="soon"),
        lambda job: job["spec"]["rayClusterSpec"]["autoscalerOptions"].update(upscalingMode="Fast"),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("groupName"),
    ],
)
def test_the_schema_that_is_held_here_refuses_what_kuberay_would(break_it):
    job = rayjob()
    break_it(job)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, RAYJOB)


def test_ray_up_file_is_what_ray_takes():
    jsonschema.validate(ray_up(), RAY_UP)


def test_all_files_ask_for_the_ray_that_is_locked():
    assert rayjob()["spec"]["rayClusterSpec"]["rayVersion"] == ray.__version__
    assert raycluster()["spec"]["rayVersion"] == ray.__version__
    assert f"rayproject/ray:{ray.__version__}-" in (DEPLOY / "Dockerfile").read_text()


def test_the_jobs_command_is_a_recipe_that_loads_with_all_its_overrides(capsys):
    program, phase, recipe, *overrides = shlex.split(rayjob()["spec"]["entrypoint"])
    assert program == "agentflow"
    recipe = str(ROOT / Path(recipe).relative_to("/opt/agentflow"))
    assert main([phase, recipe, *overrides, "--dry-run"]) == 0
    config = load_run_config(Path(recipe), overrides)
    assert config.rollout.max_workers > config.rollout.num_workers


def test_every_machine_mounts_the_folder_that_the_run_writes_to():
    spec = rayjob()["spec"]["rayClusterSpec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert "/mnt/agentflow" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert "output_dir=/mnt/agentflow/runs" in rayjob()["spec"]["entrypoint"]
    assert "-v /mnt/agentflow:/mnt/agentflow" in ray_up()["docker"]["run_options"]


def test_the_largest_cluster_has_room_for_all_workers_of_the_job():
    """Learner and engines claim 0.4 of a card each, so that two of them share one."""
    overrides = shlex.split(rayjob()["spec"]["entrypoint"])[3:]
    most = load_run_config(None, [one for one in overrides if one.startswith("rollout.")]).rollout.max_workers
    (workers,) = rayjob()["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert 1 + most == 2 * workers["maxReplicas"] * int(limits["nvidia.com/gpu"])
