"""The models and adapters that settings name: as names of the hub, or as absolute paths of what can be served.

Reads names and the first file of a folder, and no weights.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from deploy.hub_revision import cached_adapter, hub_revision, snapshot
from shared.adapter_paths import check_files, folders_of
from shared.load_errors import missing_weights
from shared.pixel_adapters import adapter_file
from shared.pixel_files import INDEX as PIPELINE_INDEX
from shared.pixel_files import is_pipeline
from shared.settings import Settings, SettingsError

EMBEDDED_NAME = "tokenyard-demo"
# The name by which `model` and `also` mean the embedded painter.
EMBEDDED_PAINTER = "tokenyard-painter"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)


def resolve_model(settings: Settings) -> Settings:
    """Make `model` a hub name, an absolute directory or the absolute path of a GGUF file."""
    if settings.model == "":
        name = settings.served_model_name or EMBEDDED_NAME
        return dataclasses.replace(settings, model=_embedded_model(), served_model_name=name)
    if settings.model == EMBEDDED_PAINTER and not Path(EMBEDDED_PAINTER).exists():
        name = settings.served_model_name or EMBEDDED_PAINTER
        return dataclasses.replace(settings, model=_embedded_painter(), served_model_name=name)
    if (gguf := _find_gguf(settings)) is not None:
        return gguf
    path = Path(settings.model).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("config.json", PIPELINE_INDEX)):
            raise SettingsError(
                f"model {settings.model!r} cannot be served: it is a folder without config.json, so not a Hugging Face "
                f"model; {missing_weights(path)}"
            )
        return dataclasses.replace(settings, model=str(path.resolve()))
    if pinned := hub_revision(settings.model):
        name = settings.served_model_name or Path(pinned[0]).name
        return dataclasses.replace(settings, model=str(snapshot(*pinned)), served_model_name=name)
    if path.exists():
        raise SettingsError(
            f"model {settings.model!r} is a file; give the folder that holds config.json, or a file .gguf"
        )
    if not _HUB_NAME.fullmatch(settings.model):
        raise SettingsError(f"model {settings.model!r} is neither a folder here nor a hub name (like Qwen/Qwen3-0.6B)")
    return settings


def _find_gguf(settings: Settings) -> Settings | None:
    """Return the settings with the GGUF file that `model` means; None where it means none. SettingsError for one that
    cannot be served."""
    path = Path(settings.model).expanduser()
    if not (settings.model.endswith(".gguf") or ":" in settings.model or any(path.glob("*.gguf"))):
        return None
    # numpy comes with it, and most models are no GGUF files.
    from shared.gguf.check import check_gguf
    from shared.gguf.find import find_gguf

    try:
        found = find_gguf(settings.model)
        if found is None:
            return None
        check_gguf(found)
    except (ValueError, OSError) as error:
        raise SettingsError(f"model {settings.model!r} cannot be served: {error}") from None
    if settings.task not in ("auto", "generate"):
        raise SettingsError(
            f"task {settings.task!r}: model {found} is a GGUF file, and these generate text only; use task generate"
        )
    # What is no path is HUB/NAME:QUANTIZATION, which is a name. A folder may be given as "." and the like.
    own_name = Path(os.path.abspath(path)).name.removesuffix(".gguf") if path.exists() else settings.model
    return dataclasses.replace(settings, model=found, served_model_name=settings.served_model_name or own_name)


def resolve_further_models(settings: Settings) -> Settings:
    """Make the models of `also` hub names or absolute directories."""
    found = {name: _resolved(name, model) for name, model in settings.further_models.items()}
    return dataclasses.replace(settings, also=",".join(f"{name}={model}" for name, model in found.items()))


def _resolved(name: str, model: str) -> str:
    try:
        found = resolve_model(Settings(model=model)).model
    except SettingsError as error:
        raise SettingsError(f"also {name}={model}: {error}") from None
    if "," in found:
        raise SettingsError(f"also {name}={model}: the folder {found!r} has a comma, which separates models; rename it")
    return found


def resolve_adapters(settings: Settings) -> Settings:
    """Make the folders of adapters absolute, also of those that are named as on the hub.

    SettingsError for a folder that is missing, or has no adapter.
    """
    found = {}
    for name, path in settings.adapter_paths.items():
        try:
            folder = (cached_adapter(path) or Path(path).expanduser()).resolve()
            # The hub's cache consists of links. Which of them are followed is the worker's to say.
            if is_pipeline(settings.model):
                adapter_file(folder)
            else:
                check_files(folder, links=True)
        except (ValueError, OSError) as error:
            raise SettingsError(f"lora {name}={path}: {error}") from None
        found[name] = str(folder)
    folders = [folder.absolute() for folder in folders_of(settings.lora_dirs)]
    for folder in folders:
        if not folder.is_dir():
            raise SettingsError(f"lora_dirs names {str(folder)!r}, which is no folder here: make it, or leave it out")
    for folder in folders_of(settings.weights_dirs):
        if not folder.is_dir():
            raise SettingsError(
                f"weights_dirs names {str(folder)!r}, which is no folder here: make it, or leave it out"
            )
    return dataclasses.replace(
        settings,
        weights_dirs=",".join(str(folder.absolute()) for folder in folders_of(settings.weights_dirs)),
        lora=",".join(f"{name}={folder}" for name, folder in found.items()),
        lora_dirs=",".join(map(str, folders)),
    )


def _embedded_model() -> str:
    # Its package is only needed here, and not when another model is served.
    from deploy.embedded_model import EMBEDDED_MODEL_PATH

    path = Path(EMBEDDED_MODEL_PATH)
    if not (path / "config.json").is_file():
        raise SettingsError(f"the embedded model is missing from {path}; name a MODEL, or make it: make demo-model")
    return str(path)


def is_background(further: Settings) -> bool:
    """Whether a further model takes no share of the machine from the others: the embedded painter, which is tiny."""
    return further.model == _embedded_painter()


def _embedded_painter() -> str:
    from deploy.embedded_model import EMBEDDED_PAINTER_PATH

    return str(EMBEDDED_PAINTER_PATH)
