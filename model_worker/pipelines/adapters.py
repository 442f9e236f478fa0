"""The adapters of a pipeline, by name: read at once, and kept until they are unloaded. Knows no rows."""

from __future__ import annotations

from pathlib import Path

from model_worker.backends.base import Backend
from shared.adapter_paths import is_name


class PipelineAdapters:
    """Adapters on one backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._handles: dict[str, int] = {}
        self._last = 0

    def load(self, name: str, path: str | Path) -> None:
        """Read a directory as PEFT saves it. ValueError or OSError gives the reason when it cannot be used."""
        if not is_name(name):
            raise ValueError(f"adapter names have 1 to 128 letters, digits and ._:/-, got {name!r}: choose another")
        if name in self._handles:
            raise ValueError(f"there is an adapter {name!r} already: unload it first")
        if not self._backend.takes_adapters:
            raise ValueError("this model takes no adapters")
        try:
            self._backend.load_adapter(self._last + 1, str(Path(path).expanduser().resolve()))
        except (ValueError, OSError) as error:
            raise ValueError(f"the adapter {name!r} in {str(path)!r} cannot be used: {error}") from error
        self._last += 1
        self._handles[name] = self._last

    def unload(self, name: str) -> None:
        """Free an adapter that no row uses. ValueError for an unknown name."""
        self._backend.drop_adapter(self.handle(name))
        del self._handles[name]

    def handle(self, name: str) -> int:
        """Return the number of an adapter for the engine; 0 without a name. ValueError for an unknown name."""
        if name and name not in self._handles:
            known = ", ".join(map(repr, self._handles)) or "none"
            raise ValueError(f"there is no adapter {name!r}; there are: {known}")
        return self._handles[name] if name else 0
