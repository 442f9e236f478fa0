"""The Helm chart, rendered by Helm itself: fit for Kubernetes' schemas, and of one mind with the server's flags."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cli import read
from deploy.nodes import Nodes, nodes_of
from shared import curve
from shared.settings_sources import resolve

CHART = Path(__file__).parents[2] / "deploy" / "helm"
DOCKERFILE = (CHART.parent / "docker" / "Dockerfile").read_text()
KUBERNETES = "1.31"
CORE = ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy")
REMOTE = {"workers": {"replicas": 2, "gpus": 1, "serverKeys": "server-keys", "peerKeys": "peer-keys"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "gpus": {"gpus": 2, "replicas": 3, "resources": {"limits": {"memory": "16Gi"}}, "tolerations": [{"key": "gpu"}]},
    "remote workers": REMOTE,
    "everything": {
        "image": {"tag": "1.2"},
        "model": "/models/chat",
        "modelClaim": "models",
        "cacheClaim": "cache",
        "settings": {"max_running": 64, "max_queued_tokens": 4_000_000, "access_log": True, "dtype": "bfloat16"},
        "replicas": 2,
        "secrets": {"apiKeys": "api", "adminKey": "admin", "hub": "hub", "tls": "tls"},
        "service": {"type": "LoadBalancer", "port": 443},
        "networkPolicy": {"from": [{"namespaceSelector": {}}]},
        "autoscaling": {"enabled": True},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "nodeSelector": {"disk": "fast"},
    },
    "groups": {
        **REMOTE,
        "model": "/models/chat",
        "workers": {**REMOTE["workers"], "leaderWorkerSet": True},
        "replicas": 3,
    },
    "scaled groups": {
        **REMOTE,
        "workers": {**REMOTE["workers"], "leaderWorkerSet": True},
        "autoscaling": {"enabled": True},
    },
    "shared models": {**REMOTE, "model": "/models/chat", "workers": {**REMOTE["workers"], "nodes": 2, "gpus": 4}},
    "scaled shared models": {
        "workers": {**REMOTE["workers"], "nodes": 2},
        "autoscaling": {"enabled": True},
        "disruptionBudget": "25%",
    },
    "scaled workers": {**REMOTE, "autoscaling": {"enabled": True, "max": 8}, "settings": {"quantization": "int8"}},
}


class Refused(Exception):
    """Helm does not render the chart with these values."""


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects, rendered by the program or the library of Helm."""
    if shutil.which("helm"):
        texts = _by_program(values)
    else:
        helm = pytest.importorskip("helm_python", reason="neither helm nor helm-python-sdk (extra `test`) is installed")
        with helm.Chart.load(CHART) as chart:
            try:
                chart.validate_schema(values)
                texts = chart.render(values, name="yard", namespace="models").items()
            except helm.HelmError as error:
                raise Refused(str(error)) from None
        texts = [text for name, text in texts if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def _by_program(values: dict[str, Any]) -> list[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values, file)
        file.flush()
        command = ["helm", "template", "yard", str(CHART), "--namespace", "models", "--values", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Refused(done.stderr)
    return [done.stdout]


@pytest.fixture(scope="module", params=VARIANTS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(VARIANTS[request.param])


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The templates of all pods."""
    found = [each["spec"]["template"] for each in of_kind(objects, "Deployment")]
    for each in of_kind(objects, "LeaderWorkerSet"):
        group = each["spec"]["leaderWorkerTemplate"]
        found += [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]
    return found


def containers(objects: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container with the spec of its pod."""
    specs = [template["spec"] for template in pods(objects)]
    return [(one, spec) for spec in specs for one in [*spec.get("initContainers", []), *spec["containers"]]]


def labels_of_pods(objects: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [template["metadata"]["labels"] for template in pods(objects)]


def leaves(values: Any, path: str = "") -> set[str]:
    if not isinstance(values, dict) or not values:
        return {path}
    return {leaf for name, value in values.items() for leaf in leaves(value, f"{path}.{name}".lstrip("."))}


def test_helm_finds_nothing_to_complain_about() -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk (extra `test`) is not installed")
    for values in VARIANTS.values():
        report = helm.lint(CHART, values, strict=True)
        # Severity 1 is the advice to give the chart an icon.
        assert [message for message in report["messages"] if message["severity"] > 1] == []
        assert not report["errors"]


def test_kubernetes_schemas_fit(objects: list[dict[str, Any]]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate (extra `test`) is not installed")
    checked = [each for each in objects if each["kind"] in CORE]
    assert len(checked) >= 4
    # Pods of a group are no object by themselves: each is checked as that of a Deployment.
    checked += [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": each["metadata"],
            "spec": {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template},
        }
        for each in of_kind(objects, "LeaderWorkerSet")
        for template in pods([each])
    ]
    for each in checked:
        validator.validate(each, KUBERNETES, strict=True)


def test_a_group_is_a_server_and_its_workers() -> None:
    """The fields are those of leaderworkerset.x-k8s.io/v1 (`api/leaderworkerset/v1` of kubernetes-sigs/lws)."""
    objects = render(VARIANTS["groups"])
    [group] = of_kind(objects, "LeaderWorkerSet")
    assert not of_kind(objects, "Deployment")
    spec = group["spec"]
    assert group["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert spec.keys() <= {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
    assert (spec["replicas"], spec["startupPolicy"]) == (3, "LeaderCreated")
    template = spec["leaderWorkerTemplate"]
    assert template.keys() == {"leaderTemplate", "workerTemplate", "size", "restartPolicy"}
    assert (template["size"], template["restartPolicy"]) == (1 + 2, "None")
    # It makes a Service of its own name.
    assert group["metadata"]["name"] not in {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    [server] = template["leaderTemplate"]["spec"]["containers"]
    [worker] = template["workerTemplate"]["spec"]["containers"]
    assert {"name": "workers", "containerPort": 5600} in server["ports"]
    assert worker["args"][:3] == ["worker", "--index=$(LWS_WORKER_INDEX)", "tcp://$(LWS_LEADER_ADDRESS):5600"]
    alone = render({**REMOTE, "model": "/models/chat"})
    assert pods(alone)[0] == template["leaderTemplate"]


def test_pods_that_share_a_model_are_ranks_of_one_worker() -> None:
    objects = render(VARIANTS["shared models"])
    [group] = of_kind(objects, "LeaderWorkerSet")
    template = group["spec"]["leaderWorkerTemplate"]
    assert (group["spec"]["replicas"], template["size"]) == (2, 2)
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group["metadata"]["name"] not in {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    [worker] = template["workerTemplate"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in worker["env"]}
    assert given["TOKENYARD_DEVICES"] == "cuda:0+cuda:1+cuda:2+cuda:3"
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert worker["args"][:2] == ["worker", "tcp://yard-tokenyard-workers:5600"]
    read_as = read(worker["args"])
    kubernetes = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "yard-worker-0.yard-worker"}
    nodes = nodes_of(read_as.nodes, read_as.node, read_as.rendezvous, kubernetes)
    assert nodes is not None
    assert nodes == Nodes(2, 1, "yard-worker-0.yard-worker:5700")
    settings = dataclasses.replace(resolve({}, given).settings, tensor_parallel=4)
    assert [*nodes.ranks(settings)] == [4, 5, 6, 7]
    [policy] = [each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"].endswith("-worker")]
    [rule] = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": policy["spec"]["podSelector"]}]


def test_gpus_of_a_pod_are_one_worker() -> None:
    objects = render({"workers": {**REMOTE["workers"], "gpus": 2}})
    [worker] = [one for one, _ in containers(objects) if one["name"] == "worker"]
    assert {each["name"]: each["value"] for each in worker["env"]}["TOKENYARD_DEVICES"] == "cuda:0+cuda:1"
    assert "--rendezvous=:5700" not in worker["args"]


def test_there_are_few_values_and_the_schema_knows_all() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert len(leaves(values)) < 40
    schema = json.loads((CHART / "values.schema.json").read_text())
    for path in leaves(values):
        known = schema
        for name in path.split("."):
            known = known["properties"][name]
            if "$ref" in known:
                known = schema["definitions"][known["$ref"].rpartition("/")[2]]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "replica"),
        ({"replicas": "two"}, "replicas"),
        ({"settings": {"api_key": "secret"}}, "api_key"),
        ({"settings": {"devices": "cpu"}}, "devices"),
        ({"workers": {"gpus": 17}}, "gpus"),
        ({"workers": {"nodes": 0}}, "nodes"),
        ({"workers": {**REMOTE["workers"], "nodes": 2, "leaderWorkerSet": True}}, "cannot have groups"),
        ({"disruptionBudget": "some"}, "disruptionBudget"),
        ({"workers": {"leaderWorkerSet": "yes"}}, "leaderWorkerSet"),
        ({"workers": {"replicas": 1}}, "CURVE keys"),
        ({**REMOTE, "replicas": 2}, "install the chart once for each server"),
        ({"service": {"port": 0}}, "port"),
        ({"workers": {**REMOTE["workers"], "nodes": 5, "gpus": 4}}, "workers.nodes is 5, .* has 4 ranks"),
        (
            {"workers": {**REMOTE["workers"], "nodes": 9, "gpus": 0}, "settings": {"tensor_parallel": 2}},
            "workers.nodes is 9, .* has 2 ranks",
        ),
        (
            {"workers": {**REMOTE["workers"], "gpus": 4}, "settings": {"tensor_parallel": 2}},
            "settings.tensor_parallel is 2 and workers.gpus is 4",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        render(values)


def test_variables_are_settings_and_commands_are_read(objects: list[dict[str, Any]]) -> None:
    for container, _ in containers(objects):
        if "args" not in container:
            continue
        given = {each["name"]: each.get("value", "from a secret") for each in container["env"]}
        resolve({}, given)
        models = {each for each in container["args"] if each.startswith("/models")}
        args = [each.replace("$(LWS_WORKER_INDEX)", "1") for each in container["args"]]
        assert {vars(read(args)).get("model")} == (models or {None})


def test_numbers_are_written_as_they_are() -> None:
    [server, *_] = [one for one, _ in containers(render(VARIANTS["everything"])) if one["name"] == "server"]
    given = {each["name"]: each.get("value") for each in server["env"]}
    assert given["TOKENYARD_MAX_QUEUED_TOKENS"] == "4000000"
    assert given["TOKENYARD_ACCESS_LOG"] == "true"


def test_no_secret_is_in_the_open(objects: list[dict[str, Any]]) -> None:
    assert not of_kind(objects, "Secret")
    for container, _ in containers(objects):
        for each in container.get("env", []):
            assert ("valueFrom" in each) == (each["name"] in ("TOKENYARD_ADMIN_API_KEY", "HF_TOKEN"))


def test_containers_are_not_root_and_write_to_volumes_only(objects: list[dict[str, Any]]) -> None:
    [user] = {int(found) for found in re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)}
    for container, pod in containers(objects):
        assert pod["securityContext"]["runAsUser"] == user
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() <= volumes
        if "args" in container:
            written = re.findall(r"\b(?:TMPDIR|XDG_CACHE_HOME)=(\S+)", DOCKERFILE)
            assert {*written, "/dev/shm"} <= {*mounted.values()}


def test_every_selector_finds_pods_and_every_port_is_there(objects: list[dict[str, Any]]) -> None:
    pods = labels_of_pods(objects)
    ports = {port["name"] for container, _ in containers(objects) for port in container.get("ports", [])}
    for each in objects:
        spec = each["spec"]
        kind = each["kind"]
        if kind in ("PodDisruptionBudget", "NetworkPolicy", "Service", "Deployment"):
            selector = spec.get("podSelector") or spec["selector"]
            wanted = selector.get("matchLabels", selector)
            assert sum(wanted.items() <= labels.items() for labels in pods) == 1, each
        if kind == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if kind == "ServiceMonitor":
            services = [one["metadata"]["labels"] for one in of_kind(objects, "Service")]
            assert any(spec["selector"]["matchLabels"].items() <= labels.items() for labels in services)


def test_probes_ask_routes_and_time_suffices(objects: list[dict[str, Any]]) -> None:
    for container, pod in containers(objects):
        if container["name"] != "server":
            continue
        paths = {container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
        assert paths == {"/health", "/ready"}
        given = {each["name"]: each.get("value") for each in container["env"]}
        drain = int(given["TOKENYARD_DRAIN_DELAY"]) + int(given["TOKENYARD_DRAIN_TIMEOUT"])
        assert pod["terminationGracePeriodSeconds"] > drain + 10
        probe = container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == 600


def test_what_scales_has_no_number_of_its_own(objects: list[dict[str, Any]]) -> None:
    kinds = ("Deployment", "LeaderWorkerSet")
    deployments = {each["metadata"]["name"]: each["spec"] for kind in kinds for each in of_kind(objects, kind)}
    scaled = {each["spec"]["scaleTargetRef"]["name"] for each in of_kind(objects, "ScaledObject")}
    assert {name for name, spec in deployments.items() if "replicas" not in spec} == scaled
    for each in of_kind(objects, "ScaledObject"):
        [target] = [
            one
            for one in objects
            if one["metadata"]["name"] == each["spec"]["scaleTargetRef"]["name"]
            and one["kind"] == each["spec"]["scaleTargetRef"].get("kind", "Deployment")
        ]
        assert target["apiVersion"] == each["spec"]["scaleTargetRef"].get("apiVersion", "apps/v1")
        [trigger] = each["spec"]["triggers"]
        [service] = [one for one in of_kind(objects, "Service") if "clusterIP" not in one["spec"]]
        query = trigger["metadata"]["query"]
        assert f'service="{service["metadata"]["name"]}"' in query
        assert "tokenyard_backlog_seconds{" in query


def test_the_copied_keys_are_those_that_server_and_worker_take(tmp_path: Path) -> None:
    """The scripts of the init containers, with folders of this test in place of the mounted ones."""
    made = tmp_path / "made"
    curve.make_server_keys(made)
    carried = curve.make_peer_keys(made, "box")
    secrets = {"server": [made / "server.key_secret", *(made / "peers").iterdir()], "worker": [*carried.iterdir()]}
    checks = {"server": curve.check_server_keys, "worker": curve.check_peer_keys}
    for deployment in of_kind(render(REMOTE), "Deployment"):
        part = deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
        [init] = deployment["spec"]["template"]["spec"]["initContainers"]
        secret = tmp_path / part / "secret"
        keys = tmp_path / part / "target"
        keys.mkdir(parents=True)
        secret.mkdir()
        for file in secrets[part]:
            shutil.copy(file, secret)
            # As Kubernetes mounts it for a group.
            (secret / file.name).chmod(0o440)
        script = init["command"][-1].replace("/secrets/curve", str(secret)).replace("/keys", str(keys))
        subprocess.run([*init["command"][:-1], script], check=True, timeout=60, env={"PATH": os.environ["PATH"]})
        checks[part](keys)
