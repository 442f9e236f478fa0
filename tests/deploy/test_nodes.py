"""The hosts of a group, by flags and by what a LeaderWorkerSet sets; and the processes of each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.nodes import Nodes, nodes_of
from deploy.remote_worker import node_specs
from shared.endpoints import RunDirectory
from shared.settings import Settings, SettingsError

LWS = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "yard-0.yard.models"}


def test_hosts_are_what_is_given_and_else_what_kubernetes_sets() -> None:
    assert nodes_of(None, None, None, LWS) is None, "a worker of one pod has these variables, too"
    assert nodes_of(2, 0, "head:6000", LWS) == Nodes(2, 0, "head:6000")
    assert nodes_of(None, None, ":5700", LWS) == Nodes(4, 3, "yard-0.yard.models:5700")
    assert nodes_of(4, None, None, LWS) == Nodes(4, 3, "yard-0.yard.models:5700")
    assert nodes_of(2, 1, "[fd00::1]:6000", {}) == Nodes(2, 1, "[fd00::1]:6000")


@pytest.mark.parametrize(
    ("nodes", "node", "rendezvous", "said"),
    [
        (1, 0, "head:1", "--nodes must be 2 or more"),
        (2, 2, "head:1", "--node must be from 0 to 1"),
        (2, None, "head:1", "--node is missing: give it, or LWS_WORKER_INDEX, which is ''"),
        (None, 0, "head:1", "--nodes is missing: give it, or LWS_GROUP_SIZE, which is ''"),
        (2, 0, None, "--rendezvous must be HOST:PORT: there is no LWS_LEADER_ADDRESS here"),
        (2, 0, "head", "--rendezvous must be HOST:PORT"),
        (2, 0, "head:70000", "--rendezvous must be HOST:PORT"),
    ],
)
def test_what_is_missing_or_wrong_is_named(nodes: int, node: int, rendezvous: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        nodes_of(nodes, node, rendezvous, {})


@pytest.mark.parametrize(("devices", "of_each"), [("cpu", 1), ("cuda:0", 1), ("cuda:0+cuda:1", 2)])
def test_each_device_of_a_host_has_a_rank(devices: str, of_each: int, tmp_path: Path) -> None:
    settings = Settings(model="m", devices=devices, tensor_parallel=of_each, curve_keys="keys")
    nodes = Nodes(2, 1, "head:5700")
    group = nodes.of_group(settings)
    assert group.tensor_parallel == 2 * of_each
    specs = node_specs(settings, RunDirectory(tmp_path), "tcp://head:5600", None, nodes)
    assert len({spec.group for spec in specs}) == 1
    for number, (spec, device) in enumerate(zip(specs, devices.split("+"), strict=True)):
        rank = of_each + number
        words = " ".join(spec.argv)
        assert spec.hang_seconds == 30.0, "others wait for a rank that was stopped"
        assert spec.name == f"model_worker:remote.{rank}"
        assert words.endswith(f"--rank {rank} --rendezvous head:5700 --device {device}")
        assert "--connect tcp://head:5600" in words


def test_settings_that_do_not_work_in_groups_are_refused() -> None:
    with pytest.raises(SettingsError, match="quantization 'int8' does not work with tensor_parallel 2"):
        Nodes(2, 0, "head:5700").of_group(Settings(model="m", devices="cpu", quantization="int8"))
