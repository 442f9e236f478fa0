"""`python -m scheduler --run-dir DIR`: started by the supervisor, one per served model."""

from __future__ import annotations

import argparse
import gc
import secrets
import signal
import sys
from pathlib import Path

from scheduler.adapter import AdapterFile
from scheduler.core import Scheduler
from scheduler.limits import Limits
from scheduler.loop import Loop
from scheduler.placement_cost import Policy, least_cost
from shared import logs, phases
from shared.endpoints import RunDirectory
from shared.liveness import become
from shared.pixel_files import is_pipeline
from shared.setting_forms import local_devices
from shared.settings import Settings, SettingsError
from shared.weights_file import WeightsFile


def limits_of(settings: Settings) -> Limits:
    return Limits(
        max_running=settings.max_running,
        max_batch_tokens=settings.max_batch_tokens,
        max_text_tokens=settings.max_batch_tokens,
        max_queued=settings.max_queued,
        max_model_len=settings.max_model_len,
        steps_in_flight=2 if settings.overlap else 1,
        most_guesses=settings.most_guesses,
        prefix_cache=settings.prefix_cache,
        max_queued_tokens=settings.max_queued_tokens,
        max_open_per_tenant=settings.max_open_per_key or 2**62,
        stall_seconds=float(settings.stall_timeout),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scheduler", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    serve(parser.parse_args().run_dir)


def serve(folder: Path, policy: Policy = least_cost) -> None:
    """Schedule for the server whose run directory this is, until a signal. `policy` places requests."""
    run_directory = RunDirectory(folder)
    become("scheduler", run_directory.stack_file("scheduler"))
    settings = Settings.read(run_directory.settings_file)
    logs.configure("scheduler", settings.log_level, settings.log_format)
    try:
        core = Scheduler(
            limits_of(settings),
            incarnation=secrets.randbits(31),
            # A pipeline that paints has its adapters from its start, and needs no orders about them.
            adapters={} if settings.lora and is_pipeline(settings.model) else settings.adapter_paths,
            adapter_file=AdapterFile(run_directory.adapters_file),
            weights_file=WeightsFile(run_directory.weights_file, run_directory.uploaded_weights),
        )
        core.policy = policy
        local = len(local_devices(settings.devices))
        loop = Loop(core, run_directory, settings.worker_endpoint, settings.curve_keys, local)
        if settings.kv_events:
            loop.publish_kv_events(settings.kv_events, settings.public_model_name)
    except (SettingsError, ValueError) as error:
        phases.fatal(str(error))
        sys.exit(str(error))
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(signal.SIGINT, lambda *_: loop.stop())
    # Objects made at start-up live as long as the process, so the collector need not visit them.
    gc.collect()
    gc.freeze()
    phases.ready()
    loop.run()


if __name__ == "__main__":
    main()
