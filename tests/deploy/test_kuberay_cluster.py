"""The cluster of KubeRay agrees with the command line, the image and the routes, and its pods fit Kubernetes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import read

FOLDER = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (FOLDER / "docker" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "kuberay" / "raycluster.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayCluster")
    return dict(found["spec"])


@pytest.fixture(scope="module")
def head(spec: dict[str, Any]) -> dict[str, Any]:
    [container] = spec["headGroupSpec"]["template"]["spec"]["containers"]
    return dict(container)


@pytest.fixture(scope="module")
def workers(spec: dict[str, Any]) -> dict[str, Any]:
    [group] = spec["workerGroupSpecs"]
    return dict(group)


def command(head: dict[str, Any]) -> list[str]:
    """The arguments of `tokenyard`, which is the last command of the head."""
    [script] = head["args"]
    *_, last = script.split("; ")
    first, second, *arguments = shlex.split(last.removeprefix("done;"))
    assert (first, second) == ("exec", "tokenyard")
    return arguments


def test_the_pods_fit_kubernetes(spec: dict[str, Any], workers: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate (extra `test`) is not installed")
    for template in (spec["headGroupSpec"]["template"], workers["template"]):
        pod = {"metadata": {"name": "x", **template.get("metadata", {})}, "spec": template["spec"]}
        validator.validate({"apiVersion": "v1", "kind": "Pod", **pod}, "1.31", strict=True)


def test_the_heads_command_is_read_and_starts_ray_before(spec: dict[str, Any], head: dict[str, Any]) -> None:
    arguments = command(head)
    assert arguments[:2] == ["ray", "up"]
    asked = read(arguments)
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert (asked.host, asked.port) == ("0.0.0.0", ports["http"])
    annotations = spec["headGroupSpec"]["template"]["metadata"]["annotations"]
    assert annotations == {"ray.io/overwrite-container-cmd": "true"}
    assert head["args"][0].startswith(
        'eval "$KUBERAY_GEN_RAY_START_CMD" & until ray health-check --address "$RAY_ADDRESS"'
    )
    assert spec["headGroupSpec"]["template"]["spec"]["terminationGracePeriodSeconds"] > asked.drain_timeout


def test_each_worker_finds_a_node(head: dict[str, Any], workers: dict[str, Any]) -> None:
    asked = read(command(head))
    [container] = workers["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert asked.workers <= workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert (asked.cpus, asked.gpus_per_worker) == (int(limits["cpu"]), int(limits["nvidia.com/gpu"]))
    knocked = {container[f"{kind}Probe"]["tcpSocket"]["port"] for kind in ("startup", "liveness", "readiness")}
    assert knocked == {int(workers["rayStartParams"]["node-manager-port"])}


def test_its_probes_are_routes_of_the_server(head: dict[str, Any]) -> None:
    told = (FOLDER.parent / "docs" / "kubernetes.md").read_text()
    probes = [head[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert all(f"`{probe['path']}`" in told and probe["port"] == "http" for probe in probes)


def test_what_the_image_writes_is_a_volume(spec: dict[str, Any], workers: dict[str, Any]) -> None:
    written = re.findall(r"\b(?:TMPDIR|XDG_CACHE_HOME)=(\S+)", DOCKERFILE)
    for template in (spec["headGroupSpec"]["template"], workers["template"]):
        [container] = template["spec"]["containers"]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() == {volume["name"] for volume in template["spec"]["volumes"]}
        assert {*written, "/dev/shm"} <= {*mounted.values()}
