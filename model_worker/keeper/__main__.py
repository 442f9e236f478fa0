"""`python -m model_worker.keeper --run-dir DIR --index I --device cuda:0`: keeps the weights of worker I.

Started by the supervisor, and ends with it.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from model_worker.keeper import cuda_pieces
from model_worker.keeper.server import Keeper
from shared import logs, phases
from shared.endpoints import RunDirectory
from shared.liveness import become
from shared.settings import Settings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model_worker.keeper", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    run_directory = RunDirectory(arguments.run_dir)
    role = f"weight_keeper:{arguments.index}"
    become(f"{role} {arguments.device}", run_directory.stack_file(role))
    settings = Settings.read(run_directory.settings_file)
    logs.configure(f"{role} {arguments.device}", settings.log_level, settings.log_format)
    path = run_directory.keeper_socket(arguments.index)
    # That of a keeper that was killed.
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        phases.ready()
        Keeper(lambda: cuda_pieces.CudaPieces(int(arguments.device.partition(":")[2] or 0))).serve(listener)


if __name__ == "__main__":
    main()
