"""From settings to processes: models, devices, environments; and `tokenyard serve` itself with stand-in packages."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.child import ChildSpec
from deploy.devices import resolve_devices, unused_gpus
from deploy.environments import common_environment, cpu_share, one_thread
from deploy.model_paths import resolve_further_models, resolve_model
from deploy.processes import child_specs
from deploy.remote_worker import remote_specs
from deploy.serve import SHARED_MEMORY, sweep_shared_memory
from shared.endpoints import RunDirectory
from shared.further_models import of_further_models
from shared.settings import Settings, SettingsError
from tests.deploy.stage import is_alive, wait_until_dead
from tests.gguf_models import random_model, write_model

GGUF_SIZE = {
    "vocab_size": 262,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_becomes_an_absolute_path(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    for text in ("tiny", "./tiny", "tiny/", "../" + model.parent.name + "/tiny"):
        settings = resolve_model(Settings(model=text))
        assert settings.model == str(model.resolve())
        assert settings.public_model_name == "tiny"


def test_the_home_folder_is_expanded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    assert resolve_model(Settings(model="~/tiny")).model == str(model.resolve())


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "org/model_name.v2"])
def test_a_hub_name_is_passed_on(name: str) -> None:
    assert resolve_model(Settings(model=name)).model == name


@pytest.mark.parametrize("text", ["./missing", "/no/such/folder", "a/b/c", "~/missing", "org/", "white space", "-x"])
def test_what_can_be_neither_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="neither a folder here nor a hub name"):
        resolve_model(Settings(model=text))


def test_a_file_and_a_folder_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="a folder without config"):
        resolve_model(Settings(model=str(tmp_path)))
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(SettingsError, match="is a file; give the folder"):
        resolve_model(Settings(model=str(file)))


def test_a_gguf_file_is_served_under_the_name_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny-GGUF"
    folder.mkdir()
    file = folder / "tiny-Q8_0.gguf"
    write_model(file, random_model("llama", {**GGUF_SIZE, "pad_token_id": None}), "llama", "Q8_0")
    for text, name in ((str(file), "tiny-Q8_0"), (str(folder), "tiny-GGUF")):
        settings = resolve_model(Settings(model=text))
        assert (settings.model, settings.public_model_name) == (str(file), name)
    assert resolve_model(Settings(model=str(file), served_model_name="mine")).public_model_name == "mine"
    monkeypatch.chdir(folder)
    assert resolve_model(Settings(model=".")).public_model_name == "tiny-GGUF"
    colon = tmp_path / "a:b"
    colon.mkdir()
    (colon / "m:1.gguf").symlink_to(file)
    assert resolve_model(Settings(model=str(colon / "m:1.gguf"))).public_model_name == "m:1"
    with pytest.raises(SettingsError, match="these generate text only"):
        resolve_model(Settings(model=str(file), task="embed"))
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(SettingsError, match=r"cannot be served: .*tiny-Q8_0\.gguf: .*the file is damaged"):
        resolve_model(Settings(model=str(file)))


def test_auto_takes_the_gpus_that_torch_could_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.machine.torch_version", lambda: "2.13.0")
    monkeypatch.setattr("deploy.machine._gpus_installed", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert resolve_devices(Settings()).devices == "cuda:0,cuda:1"
    assert resolve_devices(Settings(devices="cpu,cpu")).devices == "cpu,cpu"
    several = resolve_devices(Settings(tensor_parallel=2))
    assert (several.devices, several.tensor_parallel) == ("cuda:0+cuda:1", 2)
    assert resolve_devices(several) == resolve_devices(Settings(devices="cuda:0+cuda:1")) == several
    with pytest.raises(
        SettingsError, match="tensor_parallel 3 wants as many GPUs, and this machine has cuda:0, cuda:1"
    ):
        resolve_devices(Settings(tensor_parallel=3))
    assert (unused_gpus("auto", "cuda:0+cuda:1"), unused_gpus("cuda:0", "cuda:0")) == ("", "")
    assert unused_gpus("auto", "cuda:0") == "devices auto leaves cuda:1 unused: too few for one more group"
    with pytest.raises(SettingsError, match="devices names cuda:2"):
        resolve_devices(Settings(devices="cuda:1+cuda:2"))
    monkeypatch.setattr("deploy.machine.torch_version", lambda: "2.13.0+cpu")
    assert resolve_devices(Settings()).devices == "cpu"
    with pytest.raises(SettingsError, match="is a build without CUDA"):
        resolve_devices(Settings(devices="cuda:0+cuda:1"))


def test_each_device_gets_a_worker_and_each_command_line_names_its_module(tmp_path: Path) -> None:
    settings = Settings(devices="cuda:0,cpu", api_servers=2)
    specs = child_specs(settings, RunDirectory(tmp_path), 9)
    assert [spec.name for spec in specs] == [
        "scheduler", "model_worker:0", "model_worker:1", "api_server:0", "api_server:1",
    ]  # fmt: skip
    for spec in specs:
        named = [sys.executable, "-X", f"tokenyard={spec.name}", "-m", spec.role]
        assert spec.argv[:7] == [*named, "--run-dir", str(tmp_path)]
    assert specs[1].argv[7:] == ["--index", "0", "--device", "cuda:0"]
    assert specs[2].argv[7:] == ["--index", "1", "--device", "cpu"]
    assert specs[4].argv[7:] == ["--index", "1", "--listener", "9"]
    assert [list(spec.pass_fds) for spec in specs] == [[], [], [], [9], [9]]
    assert [spec.counts_starts for spec in specs] == [False, True, True, False, False]


def test_a_gpus_worker_may_have_a_keeper_of_its_weights(tmp_path: Path) -> None:
    settings = Settings(devices="cuda:0,cuda:1", weight_keeper=True, also="other=org/other")
    specs = child_specs(settings, RunDirectory(tmp_path), 9)
    names = ["0", "1", "other:0", "other:1"]
    assert [spec.name for spec in specs if spec.role == "weight_keeper"] == [f"weight_keeper:{name}" for name in names]
    roles = list(dict.fromkeys(spec.role for spec in specs))
    assert roles == ["scheduler", "weight_keeper", "model_worker", "api_server"], "it ends after its worker"
    keeper = next(spec for spec in specs if spec.name == "weight_keeper:other:1")
    module, *arguments = keeper.argv[keeper.argv.index("-m") + 1 :]
    assert module == "model_worker.keeper"
    assert arguments == ["--run-dir", str(tmp_path / "also0"), "--index", "1", "--device", "cuda:1"]
    assert not keeper.vital
    assert keeper.hang_seconds, "one that is stopped is replaced"
    workers = [spec for spec in specs if spec.role == "model_worker"]
    assert all(spec.argv[-1] == "--keeper" for spec in workers)
    plain = child_specs(Settings(devices="cuda:0"), RunDirectory(tmp_path))
    assert [spec.role for spec in plain] == ["scheduler", "model_worker", "api_server"]


def test_a_worker_for_a_scheduler_elsewhere_may_have_one_too(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path)
    settings = Settings(devices="cuda:1", weight_keeper=True)
    keeper, worker = remote_specs(settings, place, "tcp://elsewhere:5600", None)
    assert (keeper.name, worker.name, keeper.vital) == ("weight_keeper:remote", "model_worker:remote", False)
    assert keeper.argv[-4:] == ["--index", "-1", "--device", "cuda:1"]
    assert worker.argv[-7:] == [*keeper.argv[-4:], "--connect", "tcp://elsewhere:5600", "--keeper"]
    [alone] = remote_specs(Settings(devices="cpu"), place, "tcp://elsewhere:5600", 3)
    assert (alone.name, "--keeper" in alone.argv, alone.forks) == ("model_worker:3", False, True)


def test_the_ranks_of_a_worker_are_a_group_and_share_the_cores(tmp_path: Path) -> None:
    specs = child_specs(Settings(devices="cpu,cpu", tensor_parallel=2), RunDirectory(tmp_path), 9)
    workers = [spec for spec in specs if spec.role == "model_worker"]
    assert [spec.name for spec in workers] == [
        "model_worker:0",
        "model_worker:0.1",
        "model_worker:1",
        "model_worker:1.1",
    ]
    assert [spec.group for spec in workers] == ["model_worker:0", "model_worker:0", "model_worker:1", "model_worker:1"]
    assert [list(spec.argv[7:]) for spec in workers[2:]] == [
        ["--index", "1", "--device", "cpu"],
        ["--index", "1", "--device", "cpu", "--rank", "1"],
    ]
    assert len({spec.stack_file for spec in workers}) == 4
    pairs = Settings(devices="cuda:0+cuda:1,cuda:2+cuda:3", tensor_parallel=2)
    workers = [spec for spec in child_specs(pairs, RunDirectory(tmp_path), 9) if spec.role == "model_worker"]
    assert [spec.argv[9:] for spec in workers] == [
        ["--device", "cuda:0+cuda:1"],
        ["--device", "cuda:0+cuda:1", "--rank", "1"],
        ["--device", "cuda:2+cuda:3"],
        ["--device", "cuda:2+cuda:3", "--rank", "1"],
    ]
    assert not any(spec.forks for spec in workers)


def test_each_further_model_gets_a_scheduler_and_workers_of_its_own(tmp_path: Path) -> None:
    settings = Settings(devices="cpu,cpu", also="embed=/e,rerank=/r", task="generate", max_model_len=64)
    specs = child_specs(settings, RunDirectory(tmp_path), 9)
    assert [spec.name for spec in specs] == [
        "scheduler", "scheduler:embed", "scheduler:rerank",
        *("model_worker:0", "model_worker:1", "model_worker:embed:0", "model_worker:embed:1"),
        *("model_worker:rerank:0", "model_worker:rerank:1", "api_server:0"),
    ]  # fmt: skip
    places = {spec.name: spec.argv[spec.argv.index("--run-dir") + 1] for spec in specs}
    assert places["model_worker:embed:1"] == places["scheduler:embed"] == str(tmp_path / "also0")
    assert places["model_worker:1"] == places["api_server:0"] == str(tmp_path)
    arguments = {spec.name: list(spec.argv) for spec in specs}
    assert arguments["model_worker:0"][-2:] == arguments["model_worker:embed:1"][-2:] == ["--models", "3"]
    models = {spec.name: spec.model for spec in specs}
    assert models["scheduler:embed"] == models["model_worker:embed:1"] != models["model_worker:0"] == ""
    for name, (further, place) in zip(
        ("embed", "rerank"), of_further_models(settings, RunDirectory(tmp_path)), strict=True
    ):
        assert str(place.path) == places[f"scheduler:{name}"]
        assert (further.public_model_name, further.model) == (name, f"/{name[0]}")
        assert (further.task, further.max_model_len, further.devices) == ("auto", None, "cpu,cpu")


def test_the_embedded_painter_takes_nothing_from_the_models_beside_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def workers(also: str, devices: str = "cpu") -> dict[str, ChildSpec]:
        settings = resolve_further_models(Settings(devices=devices, also=also))
        specs = child_specs(settings, RunDirectory(tmp_path), 9)
        return {spec.name.removeprefix("model_worker:"): spec for spec in specs if spec.role == "model_worker"}

    alone = workers("")["0"]
    beside = workers("painter=tokenyard-painter")
    assert (beside["0"].argv, beside["0"].env) == (alone.argv, alone.env)
    assert beside["painter:0"].argv[-1] == "--background"
    assert beside["painter:0"].env["OMP_NUM_THREADS"] == "1"
    # Every other model has its share, and memory on a GPU is everyone's.
    assert workers(f"painter=tokenyard-painter,chat={model}")["chat:0"].argv[-2:] == ["--models", "2"]
    assert workers("painter=tokenyard-painter", "cuda:0")["painter:0"].argv[-2:] == ["--models", "2"]


def test_errors_about_further_models_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a,b" / "m"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder.parent)
    with pytest.raises(SettingsError, match=r"also e=\./m: model './m' cannot be served: it is a folder without"):
        resolve_further_models(Settings(also="e=./m"))
    (folder / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"also e=\./m: the folder .* has a comma"):
        resolve_further_models(Settings(also="e=./m"))


@pytest.mark.parametrize("also", ["embed", "=x", "a=", "a=x,a=y", "chat=x", "a b=x"])
def test_further_models_without_a_name_of_their_own_are_refused(also: str) -> None:
    with pytest.raises(SettingsError, match="also must be a list of NAME=MODEL"):
        Settings(served_model_name="chat", also=also)


@given(workers=st.integers(1, 16), usable=st.integers(1, 128), hidden=st.integers(0, 128))
def test_cpu_workers_share_the_usable_cores(workers: int, usable: int, hidden: int) -> None:
    share = cpu_share(workers, usable, usable + hidden, {})
    threads = int(share.get("OMP_NUM_THREADS", usable + hidden))
    assert threads == max(1, usable // workers)
    assert share.get("NUMBA_NUM_THREADS", str(threads)) == str(threads)
    assert cpu_share(workers, usable, usable + hidden, {"OMP_NUM_THREADS": "3"}) == {}


def test_workers_on_one_gpu_know_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    specs = child_specs(Settings(devices="cuda:0,cuda:0,cuda:1"), RunDirectory(tmp_path), 9)
    workers = [spec for spec in specs if spec.name.startswith("model_worker")]
    assert [spec.argv[-2:] for spec in workers[:2]] == [["--models", "2"]] * 2
    assert "--models" not in workers[2].argv
    assert [spec.env["OMP_NUM_THREADS"] for spec in workers] == ["1"] * 3
    assert one_thread({"OMP_NUM_THREADS": "3"}) == {}


def test_kernels_are_kept_in_the_users_cache_or_for_this_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    cache = tmp_path / "cache"
    kernels = Path(common_environment(run, {"XDG_CACHE_HOME": str(cache)})["NUMBA_CACHE_DIR"])
    assert kernels.parent == cache / "tokenyard" / "numba"
    assert common_environment(run, {"NUMBA_CACHE_DIR": str(cache)})["NUMBA_CACHE_DIR"] == str(cache)
    blocked = tmp_path / "file"
    blocked.touch()
    environment = common_environment(run, {"XDG_CACHE_HOME": str(blocked)})
    assert environment["NUMBA_CACHE_DIR"] == f"{run.path}/numba"


def test_arrays_of_killed_processes_are_swept() -> None:
    code = (
        "import os, numpy; from interfaces.wire.shared_memory import Segments; book = Segments(); "
        "print(book.share(numpy.arange(9)).name, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    left = SHARED_MEMORY / killed.stdout.strip()
    assert left.is_file()
    sweep_shared_memory()
    assert not left.exists()


STAND_IN = """
import argparse, http.server, signal, socket, sys, threading
from pathlib import Path
from shared import phases
from shared.endpoints import RunDirectory
from shared.liveness import become
from shared.settings import Settings
parser = argparse.ArgumentParser()
for flag in ("--run-dir", "--index", "--device", "--epoch", "--listener"):
    parser.add_argument(flag)
options = parser.parse_args()
run_directory = RunDirectory(Path(options.run_dir))
settings = Settings.read(run_directory.settings_file)
become(ROLE)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
def stop(*_):
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
phases.phase("import")
if ROLE == "api_server":
    server = http.server.HTTPServer((settings.host, settings.port), Ready, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(options.listener))
    signal.signal(signal.SIGQUIT, stop)
    phases.ready()
    server.serve_forever()
(run_directory.path / (ROLE + ".sock")).touch()
phases.ready()
signal.pause()
"""


class Server:
    """`tokenyard serve` with packages that only pretend to serve, so that starting and stopping is what is tested."""

    def __init__(self, folder: Path, model: Path, runs: Path | None = None) -> None:
        source, self.runs = folder / "source", runs or folder / "runs"
        self.runs.mkdir(exist_ok=True)
        for package in ("deploy", "shared", "interfaces"):
            shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("embedded_model"))
        for package in ("scheduler", "model_worker", "api_server"):
            (source / package).mkdir()
            (source / package / "__init__.py").touch()
            (source / package / "__main__.py").write_text(f"ROLE = {package!r}\n{STAND_IN}")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        elsewhere = folder / "elsewhere"
        # A folder of the operator's whose name is that of one of ours must not be taken for ours.
        (elsewhere / "scheduler").mkdir(parents=True)
        (elsewhere / "scheduler" / "__main__.py").write_text("raise SystemExit('the wrong scheduler')")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "serve", str(model), "--port", str(self.port)],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": str(source), "PYTHONSAFEPATH": "1", "TMPDIR": str(self.runs)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def read_until(self, text: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if text in line:
                return line
        raise AssertionError(f"never said {text!r}: {''.join(self.log)}")

    def children(self) -> dict[str, int]:
        """Process ids by module name, as their command lines tell."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as file:
            pids = [int(pid) for pid in file.read().split()]
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids}
        return {
            module: pid
            for pid, line in lines.items()
            for module in ("scheduler", "model_worker", "api_server")
            if f"-m {module}" in line
        }


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def test_serve_starts_tells_restarts_and_leaves_nothing_behind(folder: Path, model: Path) -> None:
    with Server(folder, model) as server:
        server.read_until("ready after")
        started = "".join(server.log)
        for name in ("scheduler", "model_worker:0", "api_server:0"):
            assert f"  {name} " in started
        assert f"http://127.0.0.1:{server.port}" in started
        example = server.read_until("try: curl")
        assert f"http://127.0.0.1:{server.port}/v1/chat/completions" in example
        assert '"model": "tiny"' in example
        (run_directory,) = server.runs.iterdir()
        assert (run_directory / "scheduler.sock").exists()
        children = server.children()
        assert set(children) == {"scheduler", "model_worker", "api_server"}
        os.kill(children["model_worker"], signal.SIGKILL)
        assert "model_worker:0 (cpu) died" in server.read_until("ERROR")
        server.read_until("model_worker:0 ")
        assert server.children()["model_worker"] != children["model_worker"]
        children = server.children()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        assert not any(map(is_alive, children.values()))
        assert list(server.runs.iterdir()) == []


def test_a_server_killed_with_sigkill_leaves_no_process_and_the_next_one_sweeps(folder: Path, model: Path) -> None:
    with Server(folder, model) as server:
        server.read_until("ready after")
        children = server.children()
        server.process.kill()
        server.process.wait()
        wait_until_dead(*children.values())
        runs = server.runs
        (left,) = runs.iterdir()
    with Server(folder / "next", model, runs) as server:
        server.read_until("ready after")
        (present,) = runs.iterdir()
        assert present != left


def test_a_taken_port_is_explained_before_anything_starts(folder: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        argv = [sys.executable, "-m", "deploy.cli", "serve", str(model), "--port", port]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 2
    assert f"port {port} is taken by another process" in result.stderr
    assert "use another --port" in result.stderr


def test_the_server_answers_while_it_runs(folder: Path, model: Path) -> None:
    with Server(folder, model) as server:
        server.read_until("ready after")
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/ready", timeout=5) as answer:
            assert answer.status == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0
