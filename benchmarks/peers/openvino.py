"""OpenVINO GenAI: a library without an HTTP server, so `openvino_server.py` puts a thin one in front of it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.peer import TORCH, Peer, Start, run
from benchmarks.standard_work import Needs

SERVER = Path(__file__).with_name("openvino_server.py")


class OpenVino(Peer):
    name = "openvino"
    version = "2026.4.1"

    def _install(self) -> None:
        self.make_venv(
            TORCH, "optimum-intel[openvino]", f"openvino=={self.version}", f"openvino-genai=={self.version}", "aiohttp"
        )
        # A torchvision that pip found for another torch breaks the import of transformers, and nothing here needs it.
        self.leave_out("torchvision")

    def prepared(self, model: Path) -> Path:
        converted = model.absolute().with_name(f"{model.name}-openvino")
        if not (converted / "openvino_tokenizer.xml").exists():
            export = [self.bin("optimum-cli"), "export", "openvino", "--model", str(model.absolute())]
            run([*export, "--task", "text-generation-with-past", "--weight-format", "fp16", str(converted)])
        return converted

    def start(self, model: Path, port: int, needs: Needs) -> Start:
        # -P: the server's folder must not be on the path, because this file would be found as `openvino`.
        command = [self.bin("python"), "-P", str(SERVER), str(model), "--port", str(port)]
        return Start([*command, "--threads", str(needs.threads), "--sequences", str(needs.sequences)])
