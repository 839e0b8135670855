"""The files in deploy/ hold what Ray and KubeRay take, and start what there is."""

import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

from configs.loading import load_run_config
from ray_jobs.run.preflight import check_labelling, check_recipe, key_variables
from ray_jobs.travel import LEFT_BEHIND

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


def test_files_match_their_schemas():
    assert rayjob()["apiVersion"] == raycluster()["apiVersion"] == "ray.io/v1"
    jsonschema.validate(rayjob(), RAYJOB)
    jsonschema.validate(raycluster()["spec"], CLUSTER)
    jsonschema.validate(ray_up(), RAY_UP)


def test_command_of_the_job_is_valid():
    """Cards and keys, which a dry run asks for as well, are those of the cluster."""
    program, phase, recipe, *overrides = shlex.split(rayjob()["spec"]["entrypoint"])
    assert (program, phase) == ("agentflow", "train")
    config = load_run_config(ROOT / Path(recipe).relative_to("/opt/agentflow"), overrides)
    check_recipe(config)
    check_labelling(config)
    assert config.rollout.max_workers > config.rollout.num_workers


def clusters():
    return {"rayjob.yaml": rayjob()["spec"]["rayClusterSpec"], "raycluster-autoscaler.yaml": raycluster()["spec"]}


def containers(cluster):
    """Every container of a cluster with the template of its pod: the head's first."""
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            yield group["template"], container


def keys_of(container):
    assert "envFrom" not in container, "a container gets the keys that it uses, by name"
    return {one["name"] for one in container.get("env", ()) if "secretKeyRef" in one.get("valueFrom", {})}


@pytest.mark.parametrize("name", clusters())
def test_head_requires_a_token_and_is_isolated(name):
    cluster = clusters()[name]
    assert cluster["authOptions"] == {"mode": "token"}
    policy = documents(name)["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    for template, _ in containers(cluster):
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    siblings, others = policy["ingress"]
    assert siblings == {"from": [{"podSelector": policy["podSelector"]}]}
    assert others["ports"] == [{"protocol": "TCP", "port": 8265}]
    operator, *submitters = others["from"]
    assert operator["podSelector"] == {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}
    names = [one["podSelector"]["matchLabels"]["batch.kubernetes.io/job-name"] for one in submitters]
    assert names == ([rayjob()["metadata"]["name"]] if name == "rayjob.yaml" else [])


@pytest.mark.parametrize("name", clusters())
def test_containers_gain_no_privileges_and_workers_no_service_account(name):
    for index, (template, container) in enumerate(containers(clusters()[name])):
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        # The autoscaler beside the head talks to Kubernetes.
        assert template["spec"].get("automountServiceAccountToken", True) is (index == 0)


def test_containers_have_only_their_keys():
    recipe = Path(shlex.split(rayjob()["spec"]["entrypoint"])[2]).relative_to("/opt/agentflow")
    config = load_run_config(ROOT / recipe)
    names = set(key_variables(config))
    of_judge = {config.label.judge.api_key_env}
    head, worker = (keys_of(container) for _, container in containers(clusters()["rayjob.yaml"]))
    assert (head, worker) == (names, names - of_judge)
    assert [keys_of(container) for _, container in containers(clusters()["raycluster-autoscaler.yaml"])] == [names] * 2
    given = {option.removeprefix("-e ").partition("=")[0] for option in ray_up()["docker"]["run_options"]}
    assert {f"{name}_FILE" for name in names} <= given


def test_image_excludes_secrets():
    """It is made of the whole folder, and pushed."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"**/{one.rstrip('/')}" for one in LEFT_BEHIND} <= set(ignored)


def test_cloud_machines_use_a_token_and_key_files():
    given = dict(
        option.removeprefix("-e ").split("=", 1)
        for option in ray_up()["docker"]["run_options"]
        if option.startswith("-e ")
    )
    assert given.pop("RAY_AUTH_MODE") == "token"
    for path in given.values():
        assert any(Path(path).is_relative_to(mounted) for mounted in ray_up()["file_mounts"]), path
    assert "--dashboard-host=127.0.0.1" in " ".join(ray_up()["head_start_ray_commands"])
