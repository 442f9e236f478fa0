"""`python -m model_worker --run-dir DIR --index I --device cpu --epoch E`.

Started by the supervisor, one per device.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shared import forkserver, logs, phases
from shared.endpoints import RunDirectory
from shared.liveness import become
from shared.setting_forms import devices_of_ranks
from shared.settings import Settings

if TYPE_CHECKING:
    from model_worker.keeper.kept_weights import KeptWeights
    from model_worker.start.place import Place
    from model_worker.tensor_parallel.start import Group

# Of a worker in the background: a tenth of a core that others want all the time.
_NICENESS = 10


def main() -> None:
    arguments = _parser().parse_args()
    run_directory = RunDirectory(arguments.run_dir)
    role = f"model_worker:{arguments.index if arguments.index >= 0 else 'remote'}"
    role += f".{arguments.rank}" if arguments.rank else ""
    become(f"{role} {arguments.device}", run_directory.stack_file(role))
    settings = Settings.read(run_directory.settings_file)
    logs.configure(f"{role} {arguments.device}", settings.log_level, settings.log_format)
    if arguments.background:
        _yield_cores()
    phases.phase("import")
    _import()
    epoch = forkserver.successor(arguments.epoch)
    become(f"{role} {arguments.device}", run_directory.stack_file(role))
    if arguments.rank:
        _follow(arguments, settings, epoch)
    else:
        _lead(arguments, settings, run_directory, epoch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m model_worker", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--models", type=int, default=1, help="number of workers that share the device")
    parser.add_argument("--background", action="store_true", help="leave the cores to other workers that want them")
    parser.add_argument("--rank", type=int, default=0, help="which rank of a group this is (tensor_parallel)")
    parser.add_argument("--rendezvous", default="", help="HOST:PORT of a group whose ranks are on several hosts")
    parser.add_argument("--keeper", action="store_true", help="a keeper has the weights, or is to have them")
    parser.add_argument("--connect", default="", help="tcp endpoint of a scheduler on another machine")
    return parser


def _yield_cores() -> None:
    """Let other workers go first. Kernels that make a group of each session compare groups before processes."""
    os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))


def _import() -> None:
    """Import everything slow before forking. Must not start threads, which a fork would miss."""
    # Imports make a million objects and hardly any garbage; looking for that takes a second.
    gc.disable()
    from model_worker.start import engine, one_shot, serve

    assert all((engine, one_shot, serve))
    gc.freeze()


def _follow(arguments: argparse.Namespace, settings: Settings, epoch: int) -> None:
    """Be another rank of a group than the first: load its part of the model, and compute what rank 0 says."""
    from model_worker.start.failures import reported
    from model_worker.tensor_parallel.start import Rank

    device = _own_device(arguments, settings)
    where = arguments.run_dir, arguments.index, epoch, arguments.rank, device
    with reported(device, None):
        rank = Rank(settings, *where, arguments.models, arguments.rendezvous)
    rank.run()


def _lead(arguments: argparse.Namespace, settings: Settings, run_directory: RunDirectory, epoch: int) -> None:
    """Load the model, as rank 0 of a group where there is one, and serve it."""
    from model_worker.start.engine import build_engine
    from model_worker.start.failures import reported
    from model_worker.start.one_shot import build_one_shot, is_one_shot
    from model_worker.start.place import Place
    from model_worker.start.serve import serve

    is_local = not arguments.connect
    place = Place(arguments.index, arguments.device, epoch, arguments.models, is_local)
    device = _own_device(arguments, settings)
    kept = _kept_weights(run_directory, place) if arguments.keeper else None
    group: Group | None = None
    with reported(device, kept):
        if is_one_shot(settings):
            served = build_one_shot(settings, place)
        else:
            if settings.tensor_parallel > 1:
                from model_worker.tensor_parallel.start import Group

                group = Group(settings, run_directory.path, place.index, epoch, device, arguments.rendezvous)
            served = build_engine(settings, place, run_directory.weights_file if is_local else None, group, kept)
    with contextlib.nullcontext() if group is None else group.telling_its_end():
        serve(
            served,
            arguments.connect or run_directory.worker_endpoint,
            keys=None if is_local else Path(settings.curve_keys),
            index_file=None if is_local else run_directory.index_file,
            trouble=None if group is None else group.trouble,
        )


def _own_device(arguments: argparse.Namespace, settings: Settings) -> str:
    rank: int = arguments.rank
    return devices_of_ranks(arguments.device, settings.tensor_parallel)[rank]


def _kept_weights(run_directory: RunDirectory, place: Place) -> KeptWeights:
    """Return what a keeper has of this worker's weights, which may be nothing."""
    from model_worker.keeper import cuda_pieces
    from model_worker.keeper.kept_weights import KeptWeights

    number = int(place.device.partition(":")[2] or 0)
    return KeptWeights(run_directory.keeper_socket(place.index), lambda: cuda_pieces.CudaPieces(number))


if __name__ == "__main__":
    main()
