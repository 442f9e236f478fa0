"""Modular's MAX, which computes Llama on a CPU in float32 only: its rates are of twice the bytes per weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.peers.peer import OFFLINE, SERVED_NAME, Peer, Start
from benchmarks.standard_work import Needs

WEIGHTS = "model.safetensors"
# By default it takes nine tenths of the machine's memory for its KV cache, and the kernel kills a process.
MEMORY_SHARE = "0.15"
TELEMETRY = "1.35.0"


class Max(Peer):
    name = "max"
    version = "26.7.0"

    def _install(self) -> None:
        # Left to itself pip tries every release of these and finds no set that fits.
        telemetry = ("sdk", "exporter-otlp-proto-grpc", "exporter-otlp-proto-http")
        pinned = [f"opentelemetry-{name}=={TELEMETRY}" for name in telemetry]
        self.make_venv(f"modular=={self.version}", *pinned, "opentelemetry-exporter-prometheus==0.56b0")

    def prepared(self, model: Path) -> Path:
        converted = model.absolute().with_name(f"{model.name}-float32")
        if not (converted / WEIGHTS).exists():
            _widen(model, converted)
        return converted

    def start(self, model: Path, port: int, needs: Needs) -> Start:
        environment = {
            **OFFLINE,
            "MAX_SERVE_HOST": "127.0.0.1",
            "MAX_SERVE_DISABLE_TELEMETRY": "1",
            "MODULAR_TELEMETRY_ENABLED": "0",
        }
        command = [self.bin("max"), "serve", "--model-path", str(model), "--served-model-name", SERVED_NAME]
        command += ["--devices", "cpu", "--quantization-encoding", "float32", "--port", str(port)]
        command += ["--max-length", str(needs.context), "--max-batch-size", str(needs.sequences)]
        return Start([*command, "--device-memory-utilization", MEMORY_SHARE], environment)


def _widen(model: Path, converted: Path) -> None:
    """The weights last: they are the sign that the folder is complete."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, converted, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    (converted / "config.json").write_text(json.dumps(config | dict.fromkeys(names, "float32"), indent=2))
    weights = {name: tensor.float() for name, tensor in load_file(model / WEIGHTS).items()}
    save_file(weights, converted / WEIGHTS, metadata={"format": "pt"})
