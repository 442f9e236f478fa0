"""What operators look at while a server runs: its processes, where connections go, and `tokenyard status`."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections import Counter

import psutil

from tests.chaos.waves import run_directory
from tests.system.server import Server

CONNECTIONS = 64
# Of so many connections, so few at one of two processes would mean that the other one takes nearly all.
LEAST_SHARE = 4
ROUNDS = 5


def held(server: Server) -> Counter[int]:
    """Connections of clients by the API process that has them."""
    found = Counter({server.child("api_server", nth).pid: 0 for nth in (0, 1)})
    for pid in found:
        connections = psutil.Process(pid).net_connections("tcp")
        found[pid] = sum(c.laddr.port == server.port and c.status == psutil.CONN_ESTABLISHED for c in connections)
    return found


def test_kept_connections_are_spread_over_the_api_processes(target: Server) -> None:
    """Both accept from one queue. On a busy machine one of them may not get a turn for a while."""
    kept = []
    try:
        for _ in range(ROUNDS):
            for _ in range(CONNECTIONS):
                kept.append(http.client.HTTPConnection("127.0.0.1", target.port, timeout=90))
                kept[-1].request("GET", "/ping")
                assert kept[-1].getresponse().read() == b""
            shares = held(target)
            if min(shares.values()) >= LEAST_SHARE:
                break
        assert shares.total() >= len(kept)
        assert min(shares.values()) >= LEAST_SHARE, shares
    finally:
        for connection in kept:
            connection.close()


def test_status_as_json(target: Server) -> None:
    directory = run_directory(target)
    command = [sys.executable, "-m", "deploy.cli", "status", "--json", "--run-dir", str(directory)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    [report] = json.loads(shown.stdout)
    assert (report["run_directory"], report["devices"]) == (str(directory), "cpu")
    assert report["deaths"] == []
    assert report["incidents"][0].endswith("worker 0 (cpu, epoch 0), idle is here")
    processes = {process["role"]: process for process in report["processes"]}
    assert {"api_server:0", "api_server:1", "model_worker:0 cpu", "scheduler"} <= set(processes)
    assert processes["scheduler"]["pid"] == target.child("scheduler").pid
    for process in processes.values():
        assert process["resident"] > 1 << 20
        assert process["seconds"] > 0
        assert (process["seconds_silent"], process["hangs"]) == (0, 0)
    scheduler = report["scheduler"]
    assert scheduler["ready"] is True
    assert [worker["device"] for worker in scheduler["workers"]] == ["cpu"]
    assert scheduler["workers"][0]["blocks_total"] > 0


def test_the_environment_of_each_process_can_be_read(target: Server) -> None:
    """Beside its title: an operator wants to see how many threads a worker was given."""
    for name in ("scheduler", "model_worker", "api_server"):
        process = target.child(name)
        assert process.cmdline()[0].startswith(f"tokenyard: {name}")
        environment = process.environ()
        assert environment["PYTHONSAFEPATH"] == "1"
        assert environment["NUMBA_CACHE_DIR"]


def test_what_runs_the_model_is_shown(target: Server) -> None:
    directory = run_directory(target)
    command = [sys.executable, "-m", "deploy.cli", "status", "--run-dir", str(directory)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "worker 0: cpu (fused stack), epoch 0" in shown
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=90)
    connection.request("GET", "/server_info")
    facts = json.loads(connection.getresponse().read())
    connection.close()
    assert facts["internal_states"][0]["backend"] == "fused stack"
