"""What `tokenyard ray up` asks of a cluster and gives to its children; tests/system/test_ray.py has a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import ray_child, ray_cluster
from deploy.cli import main
from deploy.ray_cluster import Wanted, environment, with_endpoint
from shared.settings import Settings, SettingsError
from shared.settings_sources import resolve


@pytest.mark.parametrize(
    ("wanted", "said"),
    [((0, 1, 0), "workers must be 1 to 1024, got 0"), ((1, 0, 0), "cpus"), ((1, 1, 2), "gpus-per-worker")],
)
def test_numbers_that_cannot_be_are_refused(wanted: tuple[int, int, int], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Wanted(*wanted)


def test_a_worker_asks_for_gpus_only_where_it_wants_them() -> None:
    assert Wanted(2, 4, 0).bundle == {"CPU": 4}
    assert Wanted(2, 4, 1).bundle == {"CPU": 4, "GPU": 1}


def test_the_server_has_no_device_and_an_endpoint_that_workers_reach(tmp_path: Path) -> None:
    own, endpoint = with_endpoint(Settings(), "127.0.0.1", tmp_path)
    assert (own.devices, own.worker_endpoint, own.curve_keys) == ("none", endpoint, str(tmp_path))
    given = Settings(worker_endpoint="tcp://0.0.0.0:5600", curve_keys=str(tmp_path))
    assert with_endpoint(given, "10.0.0.1", tmp_path)[1] == "tcp://10.0.0.1:5600"


def test_settings_come_back_from_the_environment_as_they_were() -> None:
    given = Settings(model="m", api_key="sesame", max_running=7, vision=False, dtype="float32", lora="a=b,c=d")
    variables = environment(given, for_worker=False)
    assert resolve({}, variables).settings == given


def test_a_worker_gets_what_it_shares_and_no_secret() -> None:
    given = Settings(model="m", api_key="sesame", port=9000, dtype="float32", quantization="int8", log_level="debug")
    assert environment(given, for_worker=True) == {
        "TOKENYARD_DTYPE": "float32",
        "TOKENYARD_QUANTIZATION": "int8",
        "TOKENYARD_LOG_LEVEL": "debug",
    }


def test_a_child_takes_its_settings_from_its_input_and_ends_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert ray_child.start(["serve"], {"TOKENYARD_PORT": "no number"}).wait(60) == 2
    assert ray_child.start(["version"], {}, {"peer.key_secret": "text"}).wait(60) == 2
    assert list(tmp_path.iterdir()) == [], "its keys are gone"


def test_keys_of_killed_processes_are_removed(tmp_path: Path) -> None:
    names = ["tokenyard-keys-left", "tokenyard-keys-used", "tokenyard-keys-young", "another"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "peer.key_secret").write_text("secret")
        if not name.endswith("young"):
            os.utime(tmp_path / name, (0, 0))
    with ray_child._locked(tmp_path / "tokenyard-keys-used"):
        ray_child.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_child_ends_with_the_process_that_started_it() -> None:
    """Its input stays open, so nothing else can end it."""
    text = (
        "import os, subprocess, sys, time; "
        "environment = os.environ | {'TOKENYARD_SUPERVISOR_PID': str(os.getpid())}; "
        "subprocess.Popen([sys.executable, '-m', 'deploy.ray_child'], env=environment); "
        "print('started', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        parent.kill()
        # The output ends when the last process that has it has ended.
        assert parent.stdout.read() == b""


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "head", "127.0.0.1:99999999"])
def test_an_address_without_a_cluster_is_an_error_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Only the address is looked at.
    monkeypatch.setattr(ray_cluster, "_ray", lambda: None)
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["ray", "up"]) == 2
    assert address in capsys.readouterr().err


def test_without_ray_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ray", "up", "--workers", "2"]) == 2
    assert "pip install 'tokenyard[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["devices", "curve_keys"])
def test_what_the_cluster_decides_is_refused_wherever_it_was_set(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_cluster, "_connect", lambda: pytest.fail("it was asked for a cluster"))
    monkeypatch.setenv(f"TOKENYARD_{name.upper()}", "cpu")
    assert main(["ray", "up"]) == 2
    assert f"{name} must be left out" in capsys.readouterr().err
