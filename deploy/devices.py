"""Which devices a server uses: those of the settings, checked, or all GPUs. Knows the machine's facts."""

from __future__ import annotations

import dataclasses
import re

from deploy import machine
from shared.setting_forms import ranks_of
from shared.settings import Settings, SettingsError


def resolve_devices(settings: Settings) -> Settings:
    """Make `devices` a list: every GPU that torch could use, else one worker on the CPU. A worker of several GPUs is a
    group of as many ranks.

    SettingsError for a GPU that this build of torch, or this machine, does not have. (A machine without any may be one
    whose driver is still being loaded: the worker judges that.)
    """
    if settings.devices == "none":
        return settings
    wanted = [device for device in re.split("[,+]", settings.devices) if device.startswith("cuda:")]
    if wanted and machine.torch_version().endswith("+cpu"):
        raise SettingsError(
            f"devices {settings.devices!r}: torch {machine.torch_version()} is a build without CUDA; "
            "use cpu, or install one with CUDA"
        )
    seen = machine.cuda_devices()
    if seen and (missing := sorted(set(wanted) - set(seen))):
        raise SettingsError(f"devices names {', '.join(missing)}, and this machine has {', '.join(seen)}")
    ranks = settings.tensor_parallel
    if settings.devices != "auto":
        [several] = {ranks} if "+" not in settings.devices else ranks_of(settings.devices)
        return dataclasses.replace(settings, tensor_parallel=several)
    if seen and len(seen) < ranks:
        raise SettingsError(f"tensor_parallel {ranks} wants as many GPUs, and this machine has {', '.join(seen)}")
    groups = ["+".join(seen[first : first + ranks]) for first in range(0, len(seen) // ranks * ranks, ranks)]
    return dataclasses.replace(settings, devices=",".join(groups) or "cpu")


def unused_gpus(wanted: str, devices: str) -> str:
    """Name the GPUs that `auto` has left over, because they are too few for a group; empty if there are none."""
    used = re.split("[,+]", devices)
    left = [gpu for gpu in machine.cuda_devices() if gpu not in used] if wanted == "auto" else []
    return f"devices auto leaves {', '.join(left)} unused: too few for one more group" if left else ""
