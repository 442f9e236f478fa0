"""The doctor: a row for each check, a remedy where one is needed, and an exit status that tells the truth."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from deploy import doctor, machine
from deploy.doctor import Verdict
from shared.resources import Room


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_machine_that_runs_these_tests_can_run_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.doctor(free_port()) == 0
    out = capsys.readouterr().out
    for subject in ("python", "torch", "cuda", "cpu", "cores", "memory", "/dev/shm", "kernel cache", "port"):
        assert subject in out
    assert "fail" not in out


def test_the_torch_pin_is_that_of_the_project() -> None:
    assert doctor.torch_pin() == "2.13.0"


def test_the_wrong_torch_fails_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "torch_version", lambda: "2.4.0+cpu")
    finding = doctor.check_torch()
    assert (finding.verdict, finding.fact) == (Verdict.FAIL, "2.4.0+cpu")
    assert finding.remedy == "pip install torch==2.13.0"
    assert doctor.doctor(free_port()) == 1
    assert "pip install torch==2.13.0" in capsys.readouterr().out


def test_no_torch_at_all_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "torch_version", lambda: "")
    assert doctor.check_torch().verdict is Verdict.FAIL


def test_a_taken_port_is_a_warning_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = doctor.check_port(taken.getsockname()[1])
    assert finding.verdict is Verdict.WARN
    assert "use another --port" in finding.remedy


def test_a_gpu_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cuda_devices", lambda: ["cuda:0"])
    monkeypatch.setattr(doctor, "_gpus_of_torch", list)
    finding = doctor.check_cuda()
    assert finding.verdict is Verdict.WARN
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy


@pytest.mark.parametrize(
    ("flags", "verdict", "words"),
    [
        ({"avx2", "avx512f", "amx_bf16"}, Verdict.OK, "AVX-512, AMX bf16"),
        ({"avx2"}, Verdict.OK, "try --dtype float32"),
        ({"asimd", "bf16"}, Verdict.OK, "NEON, bf16"),
        ({"sse2"}, Verdict.WARN, "no vector extensions"),
    ],
)
def test_cpu_features(flags: set[str], verdict: Verdict, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset(flags))
    finding = doctor.check_cpu()
    assert finding.verdict is verdict
    assert words in finding.fact


@pytest.mark.parametrize(("usable", "verdict"), [(1, Verdict.WARN), (2, Verdict.OK)])
def test_cores_within_a_quota(usable: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "core_room", lambda: Room(usable, Path("/sys/fs/cgroup/yard")))
    monkeypatch.setattr(doctor, "visible_cores", lambda: 8)
    finding = doctor.check_cores()
    assert finding.verdict is verdict
    assert finding.fact == f"{usable} usable of 8 visible (quota of /sys/fs/cgroup/yard)"


@pytest.mark.parametrize(("size", "verdict"), [(1 << 30, Verdict.WARN), (3 << 30, Verdict.OK)])
def test_memory_within_a_limit(size: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_room", lambda: Room(size, Path("/sys/fs/cgroup/yard")))
    finding = doctor.check_memory()
    assert finding.verdict is verdict
    assert finding.fact == f"{size >> 30}.0 GiB available (limit of /sys/fs/cgroup/yard)"
