"""Facts about the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import machine


@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("0,1,2", 2), ("0,-1,1", 1), ("GPU-8c1f,GPU-77aa", 2)]
)
def test_visible_devices_are_counted_as_cuda_does(visible: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_version", lambda: "2.13.0")
    monkeypatch.setattr(machine, "_gpus_installed", lambda: 2)
    devices = machine.cuda_devices({"CUDA_VISIBLE_DEVICES": visible})
    assert devices == [f"cuda:{index}" for index in range(count)]


def test_features_are_those_of_this_machine() -> None:
    assert machine.cpu_features()


def test_writable_folders_are_made(tmp_path: Path) -> None:
    assert machine.is_writable(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert not machine.is_writable(tmp_path / "file" / "b")
