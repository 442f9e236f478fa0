"""infinity: an embedding server of its own, on torch, ONNX Runtime or CTranslate2. Here on torch, its default.

Text Embeddings Inference, the other server of this kind, has no wheel: it can be measured at its URL.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.peer import OFFLINE, SERVED_NAME, TORCH, Peer, Start
from benchmarks.standard_work import Needs

# Texts of a batch, as it comes from its defaults.
BATCH = 32


class Infinity(Peer):
    name = "infinity"
    version = "0.0.78"
    embeds = True

    def _install(self) -> None:
        self.make_venv(
            TORCH, f"infinity-emb[server,torch]=={self.version}", "transformers<5", "typer<0.16", "click<8.2"
        )
        self.leave_out("torchvision")

    def start(self, model: Path, port: int, needs: Needs) -> Start:
        command = [self.bin("infinity_emb"), "v2", "--model-id", str(model), "--served-model-name", SERVED_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--url-prefix", "/v1", "--engine", "torch"]
        command += ["--device", "cpu", "--dtype", "float32", "--batch-size", str(BATCH), "--no-bettertransformer"]
        return Start(command, {**OFFLINE, "OMP_NUM_THREADS": str(needs.threads), "DO_NOT_TRACK": "1"})
