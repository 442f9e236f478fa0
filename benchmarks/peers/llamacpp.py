"""llama.cpp's llama-server, built from the sources that llama-cpp-python carries on PyPI (about 10 minutes).

TOKENYARD_BENCH_LLAMA_SERVER names a binary that is at hand instead; the sources are still needed for the conversion.
"""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path
from typing import ClassVar

from benchmarks.peers.peer import PIP, SERVED_NAME, Peer, PeerError, Start, run
from benchmarks.standard_work import Needs
from deploy.bench.client import Form

BINARY = "TOKENYARD_BENCH_LLAMA_SERVER"
JOBS = "TOKENYARD_BENCH_JOBS"
CONVERT = Path(__file__).with_name("gguf_conversion.py")


class LlamaCpp(Peer):
    name = "llamacpp"
    version = "0.3.36"
    weights: ClassVar[str] = "bf16"
    # It serves a connection that is kept open with a thread of its own, and runs out of them.
    form = Form(close_connections=True)

    @property
    def _sources(self) -> Path:
        return self.home / f"llama_cpp_python-{self.version}" / "vendor" / "llama.cpp"

    @property
    def _binary(self) -> Path:
        return Path(os.environ.get(BINARY) or self.home / "build" / "bin" / "llama-server")

    def _install(self) -> None:
        # Into a folder, not an environment: the conversion runs in ours, which has torch and transformers.
        run([*PIP, "install", "--quiet", "--no-deps", "--target", str(self.home / "site"), "sentencepiece<0.3"])
        if not self._sources.exists():
            wanted = f"llama-cpp-python=={self.version}"
            run([*PIP, "download", "--quiet", "--no-deps", "--no-binary", ":all:", wanted], self.home)
            with tarfile.open(self.home / f"llama_cpp_python-{self.version}.tar.gz") as archive:
                archive.extractall(self.home, filter="data")
        if not self._binary.exists():
            self._build()

    def _build(self) -> None:
        if os.environ.get(BINARY):
            raise PeerError(f"{BINARY} names {self._binary}, which does not exist")
        build = str(self.home / "build")
        configure = ["cmake", "-S", str(self._sources), "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        without = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_UI", "LLAMA_BUILD_TESTS")
        run([*configure, "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in without)])
        run(["ninja", "-C", build, "-j", os.environ.get(JOBS, str(os.cpu_count())), "llama-server"])

    def prepared(self, model: Path) -> Path:
        if model.suffix == ".gguf":
            return model
        converted = model.absolute().with_name(f"{model.name}-{self.weights}.gguf")
        if not converted.exists():
            partial = converted.with_suffix(".partial")
            command = [sys.executable, "-P", str(CONVERT), str(self._sources), str(model.absolute()), str(partial)]
            run([*command, self.weights], environment={"PYTHONPATH": str(self.home / "site")})
            partial.rename(converted)
        return converted

    def start(self, model: Path, port: int, needs: Needs) -> Start:
        threads, slots = str(needs.threads), str(needs.sequences)
        command = [str(self._binary), "--model", str(model), "--alias", SERVED_NAME]
        command += ["--host", "127.0.0.1", "--port", str(port), "--threads", threads, "--threads-batch", threads]
        # The context is shared out evenly to the slots, so each gets what the longest sequence needs.
        command += ["--parallel", slots, "--ctx-size", str(needs.sequences * needs.context)]
        return Start([*command, "--batch-size", "2048", "--ubatch-size", "512", "--no-webui"])


class LlamaCppInt8(LlamaCpp):
    """The same build with weights of one byte (Q8_0: a scale for each 32 of them), beside our `--quantization int8`."""

    name = "llamacpp-int8"
    weights = "q8_0"

    def __init__(self, cache: Path) -> None:
        super().__init__(cache)
        self.home = LlamaCpp(cache).home
