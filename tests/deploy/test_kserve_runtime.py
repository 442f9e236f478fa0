"""The runtime of KServe is of one mind with the command line, the image and the routes, and its pod fits Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import read

FOLDER = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (FOLDER / "docker" / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "kserve" / "runtime.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    return dict(found["spec"])


def test_the_pod_fits_kubernetes(spec: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate (extra `test`) is not installed")
    pod = {"containers": spec["containers"], "volumes": spec["volumes"]}
    validator.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, "1.31", strict=True)


def test_its_command_is_read(spec: dict[str, Any]) -> None:
    [container] = spec["containers"]
    _, model, *flags = container["args"]
    assert model == "/mnt/models"
    assert read([re.sub(r"\{\{.*?\}\}", "a-name", each) for each in container["args"]]).model == model
    [port] = container["ports"]
    assert f"--port={port['containerPort']}" in flags


def test_its_probes_are_routes_of_the_protocol(spec: dict[str, Any]) -> None:
    [container] = spec["containers"]
    probes = [container["startupProbe"]["httpGet"], container["readinessProbe"]["httpGet"]]
    told = (FOLDER.parent / "docs" / "kserve.md").read_text()
    assert all(f"`GET {probe['path']}`" in told for probe in probes)
    assert {probe["port"] for probe in probes} == {container["ports"][0]["containerPort"]}


def test_what_the_image_writes_is_a_volume(spec: dict[str, Any]) -> None:
    [container] = spec["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in spec["volumes"]}
    written = re.findall(r"\b(?:TMPDIR|XDG_CACHE_HOME)=(\S+)", DOCKERFILE)
    assert {*written, "/dev/shm"} <= {*mounted.values()}
