"""The LoRA adapters of a pipeline: loaded by diffusers, and switched between passes.

A switch is for the whole pipeline, so images of different adapters never share a pass. Knows diffusers' loader; knows
no images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model_worker.model import ModelRefused, first_line
from shared.pixel_adapters import adapter_file, digest


@dataclass(frozen=True)
class AdapterUse:
    """An adapter by the digest of its content, and its strength."""

    digest: str
    scale: float


@dataclass(eq=False)
class PixelAdapters:
    """The adapters of one pipeline. None of them is in use at first."""

    pipe: Any
    # Names within the pipeline by the digests of contents.
    _names: dict[str, str] = field(default_factory=dict)
    _used: AdapterUse | None = None

    def load(self, folders: Mapping[str, str], kind: str) -> None:
        """Load adapters by their names. ModelRefused says why one cannot be used."""
        for name, folder in folders.items():
            try:
                path = adapter_file(folder)
                if (content := digest(path)) in self._names:
                    continue
                own = f"adapter_{len(self._names)}"
                self.pipe.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=own)
                if not any(own in loaded for loaded in self.pipe.get_list_adapters().values()):
                    raise ValueError("none of its weights is for this pipeline: give an adapter of the same base model")
            except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError, AttributeError) as error:
                raise ModelRefused(kind, f"lora {name}={folder}: {first_line(error)}") from error
            self._names[content] = own
        if self._names:
            self.pipe.disable_lora()

    def check(self, use: AdapterUse | None) -> None:
        """ValueError for an adapter that is not there."""
        if use is not None and use.digest not in self._names:
            raise ValueError("lora: the adapter's file has changed since this worker started: restart the server")

    def switch(self, use: AdapterUse | None) -> None:
        """Use an adapter from now on, or none."""
        if use == self._used:
            return
        if use is None:
            self.pipe.disable_lora()
        else:
            self.pipe.set_adapters([self._names[use.digest]], [use.scale])
            self.pipe.enable_lora()
        self._used = use
