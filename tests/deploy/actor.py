"""A small child process for supervisor tests: speaks the status pipe, then does what its arguments say.

python -m tests.deploy.actor [--say TEXT] [--fatal TEXT [--may-pass]] [--fatal-if FILE]
                             [--never-ready] [--grandchild FILE] [--only-once] [--after SECONDS] [--epoch N]
                             [--then serve|leave|stubborn|slow to retire|exit:CODE|signal:NAME]
                             [--beat-for SECONDS] [--stack FILE]
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shared import forkserver, phases
from shared.liveness import become


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--say", default="")
    parser.add_argument("--fatal", default="")
    parser.add_argument("--may-pass", action="store_true")
    parser.add_argument("--fatal-if", default="", metavar="FILE")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--grandchild", default="")
    parser.add_argument("--only-once", action="store_true", help="serve as epoch 0 only")
    parser.add_argument("--then", default="serve")
    parser.add_argument("--after", type=float, default=0.0)
    parser.add_argument("--epoch", type=int, default=-1)
    parser.add_argument("--beat-for", type=float, default=0.0, help="then it hangs; as epoch 0 only")
    parser.add_argument("--stack", type=Path)
    arguments = parser.parse_args()
    become("actor", arguments.stack)
    phases.phase("import")
    epoch = forkserver.successor(arguments.epoch)
    become("actor", arguments.stack)
    signal.signal(signal.SIGQUIT, signal.SIG_IGN if arguments.then == "slow to retire" else lambda *_: sys.exit(0))
    if arguments.then == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    phases.phase("load weights")
    phases.progress(1, 2, "tensors")
    if arguments.say:
        print(arguments.say, file=sys.stderr)
    if arguments.grandchild:
        start_grandchild(arguments.grandchild)
    if arguments.fatal:
        phases.fatal(arguments.fatal, arguments.may_pass)
    if os.path.exists(arguments.fatal_if):
        phases.fatal(Path(arguments.fatal_if).read_text())
        sys.exit(1)
    if arguments.only_once and epoch > 0:
        sys.exit("once was enough")
    if not arguments.never_ready:
        forkserver.has_served()
        phases.ready(epoch=epoch, pid=os.getpid())
    if arguments.beat_for:
        beat(arguments.beat_for if epoch <= 0 else math.inf)
    time.sleep(arguments.after)
    end(arguments.then if arguments.then != "leave" or epoch == 0 else "serve")


def beat(seconds: float) -> None:
    phases.BEAT_SECONDS = 0.05
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        phases.beat()
        time.sleep(0.05)


def start_grandchild(file: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(file, "w") as out:
        out.write(str(child.pid))


def end(manner: str) -> None:
    kind, _, argument = manner.partition(":")
    if kind == "leave":
        phases.leave("leaves to a better one")
        sys.exit(0)
    if kind == "missed":
        phases.missed("rank 1 of 2 has not come")
        sys.exit(1)
    if kind == "exit":
        sys.exit(int(argument))
    if kind == "signal":
        os.kill(os.getpid(), signal.Signals[argument])
    time.sleep(60)


if __name__ == "__main__":
    main()
