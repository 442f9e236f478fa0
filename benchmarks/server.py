"""A server of this checkout for the time of a benchmark: started, waited for, stopped, each within a limit.

Knows a command and a URL. It does not know what the server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import aiohttp
import psutil

from shared.kernel_cache import kernel_cache_directory

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.2
STOP_S = 20.0
LOG_LINES = 20


class ServerError(RuntimeError):
    """The server did not come up; the text carries the end of its log."""


def serve_command(port: int, flags: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", "serve", "--port", str(port), *flags]


@functools.cache
def compile_kernels(kinds: tuple[str, ...] = ("float32", "bfloat16", "encoder float32")) -> None:
    """Has the kernels of our server compiled, once for this checkout: until then it computes in plain torch.

    To find them there takes seconds, too, so a process looks once.
    """
    environment = {"NUMBA_CACHE_DIR": str(kernel_cache_directory()), **os.environ}
    for kind in kinds:
        family, _, dtype = kind.rpartition(" ")
        command = [sys.executable, "-m", "model_worker.compile_kernels", "--dtype", dtype]
        command += ["--family", family or "decoder"]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, folder: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of `command` in `folder`, with its output in `log`; at the end SIGTERM, then what is left is killed.

    `environment` is laid over this process's own.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield process
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for orphan in psutil.wait_procs(children, timeout=1)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            orphan.kill()


async def wait_until_ready(url: str, process: subprocess.Popen[bytes] | None, log: Path | None, limit: float) -> None:
    """Returns when GET /ready answers 200, or /health where there is no /ready."""
    deadline = time.monotonic() + limit
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while not await _is_ready(session, url):
            if process is not None and process.poll() is not None:
                raise ServerError(f"the server ended with exit code {process.returncode}{end_of(log)}")
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{url} is not ready after {limit:g} s: raise --start-timeout if it needs longer{end_of(log)}"
                )
            await asyncio.sleep(POLL_S)


async def model_name(url: str, api_key: str | None) -> str:
    """The first model that the server lists."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10), headers=headers) as session,
        session.get(f"{url}/v1/models") as response,
    ):
        if response.status != 200:
            raise ServerError(f"GET {url}/v1/models answered {response.status}: name the model with --model")
        return str((await response.json())["data"][0]["id"])


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready") as ready:
            if ready.status != 404:
                return ready.status == 200
        async with session.get(f"{url}/health") as health:
            return health.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def end_of(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return f"; the end of {log}:\n" + "\n".join(lines)
