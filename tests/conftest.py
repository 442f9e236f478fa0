"""Settings for every test: tiny models compute faster on one thread than on two that wait for each other.

Hypothesis judges results, not speed: on a loaded machine any example can take longer than its usual deadline.
"""

from __future__ import annotations

import gc
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
from httpx import _config as httpx_defaults
from httpx._transports import default as httpx_transports

from benchmarks.server import compile_kernels
from shared.kernel_cache import kernel_cache_directory
from tests import lanes, seeds
from tests.system.server import Server

os.environ["NUMBA_CACHE_DIR"] = str(kernel_cache_directory())
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Kernels of GPUs are interpreted. Triton asks for it when it is first imported.
os.environ["TRITON_INTERPRET"] = "1"
# The tests start hundreds of processes: each would compile our sources anew, which takes a server's two seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
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

TESTS = Path(__file__).parent

seeds.install()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if seeds.SEED:
        terminalreporter.write_line(f"random inputs were those of TOKENYARD_TEST_SEED={seeds.SEED}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seeds.seed_by(item.nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    names = ",".join(lanes.LANES)
    parser.addoption("--lane", default=names, metavar="NAME,...", help=f"tests of these lanes only: {names}")


def pytest_configure(config: pytest.Config) -> None:
    wrong = set(config.getoption("lane").split(",")) - set(lanes.LANES)
    if wrong:
        raise pytest.UsageError(f"--lane has {', '.join(sorted(wrong))}; lanes are {', '.join(lanes.LANES)}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keeps files of other lanes from being imported."""
    if not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    return None if _lane(collection_path) in config.getoption("lane").split(",") else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is of other lanes although its file was named, and puts the cold start first: where there are no
    kernels yet, it makes those of the other tests. Marks slow files before pytest chooses by marks.
    """
    chosen = config.getoption("lane").split(",")
    others = [item for item in items if _lane(item.path) not in chosen]
    if others:
        config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if _lane(item.path) in chosen]
    for item in items:
        if lanes.is_slow(_within_tests(item.path)):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: lanes.place_in_lane(_within_tests(item.path)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compiles kernels once, before servers start: a worker that is followed by one with kernels rounds otherwise."""
    # Modules and tests are a million objects, and to look for garbage among them takes a third of a second each time.
    gc.collect()
    gc.freeze()
    serving = [item for item in session.items if _lane(item.path) == lanes.SERVING]
    if session.config.option.collectonly or not serving:
        return
    comes_cold = str(_within_tests(session.items[0].path)) == lanes.COLD_START
    compile_kernels((*(() if comes_cold else ("float32",)), "bfloat16", "encoder float32"))


def _lane(path: Path) -> str:
    return lanes.lane_of(_within_tests(path))


def _within_tests(path: Path) -> Path:
    return path.relative_to(TESTS) if path.is_relative_to(TESTS) else Path(path.name)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server of the embedded model for all tests that leave it running."""
    with Server(None, [], tmp_path_factory.mktemp("embedded") / "log") as server:
        yield server
