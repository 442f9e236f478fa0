"""Settings for every test: tiny models compute faster on one thread than on two that wait for each other.

Hypothesis judges results, not speed: on a loaded machine any example can take longer than its usual deadline.
"""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
from httpx import _config as httpx_defaults
from httpx._transports import default as httpx_transports

from benchmarks.server import compile_kernels
from shared.kernel_cache import kernel_cache_directory
from tests import seeds
from tests.system.server import Server

os.environ["NUMBA_CACHE_DIR"] = str(kernel_cache_directory())
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell ignores it for what it runs in the background, and the servers of the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # The same under nohup, which supervisors respect.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# httpx waits five seconds for an answer, and a loaded machine can stand still for as long. This object is the default
# of all its functions.
for kind in ("connect", "read", "write", "pool"):
    setattr(httpx_defaults.DEFAULT_TIMEOUT_CONFIG, kind, 60.0)
# Each of its clients, and each call without one, reads all certificates of authorities, which takes 25 ms.
_usual_context = httpx.create_ssl_context()
_made_context = httpx.create_ssl_context


def _one_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    return _usual_context if verify is True and cert is None else _made_context(verify, cert, trust_env)


setattr(httpx_transports, "create_ssl_context", _one_context)  # noqa: B010
hypothesis.settings.register_profile("house", deadline=None, derandomize=seeds.DERANDOMIZED)
hypothesis.settings.load_profile("house")

collect_ignore = ["clients"]
"""They run in an environment of their own: `make test-clients`."""

# Tests with servers that compute. Those of tests/deploy have stand-ins.
SERVING = ("tests/system/", "tests/chaos/", "tests/benchmarks/", "tests/components/", "tests/docs/test_readme.py")


COLD_START = "tests/system/test_cold_start.py"


seeds.install()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if seeds.SEED:
        terminalreporter.write_line(f"random inputs were those of TOKENYARD_TEST_SEED={seeds.SEED}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seeds.seed_by(item.nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The test that wants no kernels comes first: where there are none yet, it makes those of the other tests."""
    items.sort(key=lambda item: not item.nodeid.startswith(COLD_START))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles kernels once, before servers start: a worker that is followed by one with kernels rounds otherwise."""
    serving = [item for item in session.items if item.nodeid.startswith(SERVING)]
    if session.config.option.collectonly or not serving:
        return
    comes_cold = serving[0].nodeid.startswith(COLD_START)
    compile_kernels((*(() if comes_cold else ("float32",)), "bfloat16", "encoder float32"))


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of the embedded model for all tests that leave it running."""
    with Server(None, [], tmp_path_factory.mktemp("embedded") / "log") as server:
        yield server
