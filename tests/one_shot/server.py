"""The processes of a pooling server without HTTP, started and killed by the test, and tiny models for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, BertConfig, BertModel

from shared.endpoints import RunDirectory
from shared.settings import Settings

VOCAB = 200


def tiny_bert(path: Path) -> Path:
    """A random encoder. No compiled layers have its activation: their kernels would take a minute at first."""
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=160,
        initializer_range=0.5,
        hidden_act="relu",
    )
    BertModel(config).eval().save_pretrained(path)
    return path


def reference(path: Path, texts: list[NDArray[np.int32]], last: bool = False) -> NDArray[np.float32]:
    """What transformers computes of each text by itself: the mean of its states, or the last one, with length 1."""
    auto: Any = AutoModel
    model = auto.from_pretrained(path, dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for text in texts:
            states = model(input_ids=torch.from_numpy(text.astype(np.int64))[None]).last_hidden_state[0]
            rows.append(torch.nn.functional.normalize(states[-1] if last else states.mean(0), dim=-1).numpy())
    return np.stack(rows)


class PoolingServer:
    """A scheduler and workers of one run directory; a dead process is followed by the next only when asked."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        self.run_directory = RunDirectory(directory)
        self.run_directory.settings_file.write_text(replace(Settings(), model=str(model), **settings).to_json())
        self.epochs: dict[int, int] = {}
        # Of all processes that were started.
        self.pids: set[int] = set()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._keepers: list[threading.Thread] = []
        self._stopping = threading.Event()

    def start_scheduler(self) -> None:
        self._start("scheduler", "scheduler")

    def start_worker(self, index: int = 0) -> None:
        self.epochs[index] = self.epochs.get(index, -1) + 1
        name = f"worker {index}"
        self._start(name, "model_worker", "--index", str(index), "--epoch", str(self.epochs[index]))

    def keep(self, index: int = 0) -> None:
        """Start the worker, and start it again whenever it ends."""

        def watch() -> None:
            while not self._stopping.is_set():
                self.start_worker(index)
                self._processes[f"worker {index}"].wait()

        self._keepers.append(threading.Thread(target=watch, daemon=True))
        self._keepers[-1].start()

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def close(self) -> None:
        self._stopping.set()
        for name in sorted(self._processes, reverse=True):
            self.kill(name)
        for keeper in self._keepers:
            keeper.join(60)

    def __enter__(self) -> PoolingServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, "--run-dir", str(self.run_directory.path), *arguments]
        self._processes[name] = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.pids.add(self._processes[name].pid)
