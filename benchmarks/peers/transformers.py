"""`transformers serve` with continuous batching: the library's own server."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.peer import OFFLINE, TORCH, Peer, Start
from benchmarks.standard_work import Needs
from deploy.bench.client import Form

BLOCK = 32
BATCH_TOKENS = 512


class TransformersServe(Peer):
    name = "transformers"
    version = "5.23.0"
    # String prompts only, and 422 for fields that it does not know. The standard models never end by themselves.
    form = Form(text_prompts=True, plain_body=True)

    def _install(self) -> None:
        self.make_venv(TORCH, f"transformers[serving]=={self.version}")

    def model_name(self, model: Path) -> str:
        return str(model)

    def start(self, model: Path, port: int, needs: Needs) -> Start:
        # Without a number of blocks it sizes its cache by the machine's memory: 9 GB even for the tiny model.
        blocks = needs.sequences * -(-needs.context // BLOCK)
        command = [self.bin("transformers"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--device", "cpu", "--dtype", "bfloat16", "--attn-implementation", "sdpa", "--log-level", "error"]
        command += ["--continuous-batching", "--cb-block-size", str(BLOCK), "--cb-num-blocks", str(blocks)]
        command += ["--cb-max-batch-tokens", str(BATCH_TOKENS)]
        return Start(command, {**OFFLINE, "OMP_NUM_THREADS": str(needs.threads)})
