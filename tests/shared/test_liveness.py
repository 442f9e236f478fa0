"""A child's title, its end with its supervisor, and what it prints when it seems stuck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from shared.liveness import SUPERVISOR_PID, role_option

CHILD = "from shared.liveness import become; import time; become('demo'); print('up', flush=True); time.sleep(60)"


def start(**env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )


def test_the_title_names_role_and_command() -> None:
    with start() as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        title = Path(f"/proc/{child.pid}/cmdline").read_text()
        child.kill()
    assert title.startswith("tokenyard: demo [-c from shared.liveness")


def test_a_title_that_fits_leaves_the_environment_readable() -> None:
    """Also after a title that has more digits in it, as that of a later epoch has."""
    again = CHILD.replace("print(", "become('demo:9999'); print(")
    command = [sys.executable, *role_option("demo"), "-c", again]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "WANTED": "is here"}) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        title, environment = (Path(f"/proc/{child.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        child.kill()
    assert title.rstrip(b"\0").decode() == f"tokenyard: demo:9999 [-c {again}]"
    assert b"WANTED=is here" in environment.split(b"\0")
    assert b"SPT_NOENV" not in environment


def test_a_title_that_does_not_fit_is_whole() -> None:
    """It takes the place of the environment."""
    role = "demo" * 100
    with subprocess.Popen(
        [sys.executable, "-c", CHILD.replace("demo", role)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        title = Path(f"/proc/{child.pid}/cmdline").read_bytes()
        child.kill()
    assert title.rstrip(b"\0 ").decode().startswith(f"tokenyard: {role} [-c ")


def test_sigusr1_prints_every_stack_and_the_child_lives_on() -> None:
    with start() as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.send_signal(signal.SIGUSR1)
        first = child.stderr.readline()
        alive = child.poll() is None
        child.kill()
    assert "most recent call first" in first
    assert alive


def test_a_child_whose_supervisor_is_another_does_not_start() -> None:
    with start(**{SUPERVISOR_PID: "1"}) as child:
        _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "the supervisor ended before this process had started" in err


def test_a_child_of_its_supervisor_starts_whatever_the_supervisors_id() -> None:
    with start(**{SUPERVISOR_PID: str(os.getpid())}) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.kill()


def test_a_child_ends_when_its_supervisor_is_killed() -> None:
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        supervisor.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_process_has_inherited_goes_to_none_of_its_children() -> None:
    ours, theirs = os.pipe()
    code = (
        "from shared.liveness import become; import subprocess, sys; become('demo');"
        "subprocess.run([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)'], close_fds=False)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, pass_fds=[theirs]) as child:
        os.close(theirs)
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        (grandchild,) = psutil.Process(child.pid).children()
        try:
            child.kill()
            child.wait()
            os.set_blocking(ours, False)
            assert os.read(ours, 1) == b"", "the pipe has not ended"
        finally:
            grandchild.kill()
            os.close(ours)
