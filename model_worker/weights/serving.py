"""The model that a worker serves, and how another version of its weights takes its place.

A new version is loaded as at a start, with every check and every form of weights made anew, beside the one that is
used. So a version that cannot be used changes nothing, and one that can is what a fresh worker would have. Both are in
memory for a while. Knows versions, files and backends. Does not know rows, nor why the weights change.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from interfaces import KV_CACHE, WEIGHTS, WeightsVersion
from model_worker.adapter_loads import AdapterLoads
from model_worker.cpu.gemm.embedding import CodedEmbedding
from model_worker.cpu.gemm.packed_linear import PackedLinear
from model_worker.cpu.gemm.panel_linear import PanelLinear
from model_worker.host_memory import trim_heap
from model_worker.model import LoadedModel, ModelRefused
from model_worker.recurrent.states import StateLayout
from model_worker.runner import ModelRunner
from shared.resources import free_memory
from shared.weights_file import bytes_of, stamp_of

log = logging.getLogger(__name__)

# Loads the model in a folder or file with the tensors of these files in the place of its own.
Load = Callable[[str, list[Path]], LoadedModel]
# Does something with the runner of a version: has steps computed by it, or records decode steps as graphs.
Use = Callable[[ModelRunner], None]
# Room that loading takes beside the weights: they are read, then reordered one at a time.
_SLACK = 1.2
# Most numbers of a weight that are read at a time.
MOST_VALUES = 1 << 20


class WeightsRefused(ValueError):
    """A version that cannot be used; the message names the value and the remedy."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    version: WeightsVersion
    runner: ModelRunner


class ServedModel:
    """The model of one worker. All methods are for the thread that runs the steps; no step is in flight."""

    def __init__(
        self,
        runner: ModelRunner,
        version: WeightsVersion,
        own_source: str,
        load: Load,
        use: Use,
        record: Use,
        adapters: AdapterLoads | None,
    ) -> None:
        """`own_source` is the model of the settings."""
        self._runner = runner
        self._own_source = own_source
        self._load = load
        self._use = use
        self._record = record
        self._adapters = adapters
        self._prepared: _Prepared | None = None
        self.version = version
        # Tags of memory that was released.
        self.absent: set[str] = set()

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def loaded(self) -> LoadedModel:
        return self._runner.loaded

    # Versions

    def prepare(self, version: WeightsVersion) -> str:
        """Load a version beside the one that is used. Returns its stamp. WeightsRefused says why it cannot be used."""
        self.abandon()
        try:
            source = version.source or self._own_source
            stamp = stamp_of(source, version.overlays)
            if version.stamp not in ("", stamp):
                remedy = f'POST /update_weights_from_disk {{"model_path": "{source}"}} serves them as they are now'
                raise WeightsRefused(f"the files in {source} have changed since they were read: {remedy}")
            self._check_room(version)
            runner = self._runner_of(version)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            gc.collect()
            trim_heap()
            if isinstance(error, WeightsRefused):
                raise
            raise WeightsRefused(_reason(error)) from error
        self._prepared = _Prepared(replace(version, stamp=stamp), runner)
        return stamp

    def use_prepared(self, number: int) -> None:
        """Compute with version `number`, which was prepared, from now on, and let go of the one before."""
        prepared = self._prepared
        if prepared is None:
            raise WeightsRefused("no version was prepared")
        if prepared.version.number != number:
            raise WeightsRefused(f"version {prepared.version.number} was prepared, and {number} is to be used")
        self._prepared = None
        before = self._runner
        self._take(prepared.runner)
        self.version = prepared.version
        self.absent.discard(WEIGHTS)
        free_weights(before.loaded)

    def abandon(self) -> None:
        """Forget the version that was prepared, if there is one."""
        if self._prepared is not None:
            prepared = self._prepared
            self._prepared = None
            free_weights(prepared.runner.loaded)

    # Memory

    def release(self, tags: list[str]) -> None:
        """Give memory back. Nothing is computed until `resume`."""
        if WEIGHTS in tags and WEIGHTS not in self.absent:
            if self._adapters is not None:
                self._adapters.hold()
            free_weights(self.loaded)
            self.absent.add(WEIGHTS)
        if KV_CACHE in tags and KV_CACHE not in self.absent:
            self._runner.cache.release()
            self.absent.add(KV_CACHE)
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self, tags: list[str]) -> None:
        """Take memory again. The weights are read from the files of their version. WeightsRefused if they cannot be."""
        if KV_CACHE in tags and KV_CACHE in self.absent:
            self._runner.cache.restore()
            self.absent.discard(KV_CACHE)
            if WEIGHTS not in self.absent and self.loaded.device.type == "cuda":
                # Recorded graphs know the addresses of the old memory.
                self._take(self._make_runner(self.loaded))
        if WEIGHTS in tags and WEIGHTS in self.absent:
            self.prepare(self.version)
            self.use_prepared(self.version.number)

    # Values

    def read(self, name: str, most: int) -> torch.Tensor:
        """Return the first rows of a weight, in float32.

        WeightsRefused for a name that the model has not, and for more than MOST_VALUES numbers.
        """
        if WEIGHTS in self.absent:
            raise WeightsRefused("the weights were released: POST /resume_memory_occupation or /wake_up first")
        path, _, last = name.rpartition(".")
        try:
            value = getattr(self.loaded.model.get_submodule(path), last)
        except AttributeError:
            value = None
        if not isinstance(value, torch.Tensor):
            some = ", ".join(name for name, _ in list(self.loaded.model.named_parameters())[:3])
            raise WeightsRefused(f"name {name!r:.200} is no weight of this model, which has {some} and others")
        first = value.detach()[:most] if value.dim() else value.detach()
        # Before they are converted: that takes memory.
        if first.numel() > MOST_VALUES:
            raise WeightsRefused(
                f"truncate_size {most} of {name!r:.200} asks for {first.numel()} numbers, and {MOST_VALUES} are the "
                "most: ask for fewer rows"
            )
        return first.float().cpu()

    # Inside

    def _check_room(self, version: WeightsVersion) -> None:
        """Refuse a version that does not fit beside the one that is used."""
        if self.loaded.device.type != "cpu":
            return
        # Files may be of fewer bits than what is made of them, and a name on the hub has no files here.
        files = bytes_of(version.source or self._own_source, version.overlays)
        needed = int(max(files, self.loaded.parameter_bytes) * _SLACK)
        free = free_memory()
        if needed > free:
            remedy = (
                ""
                if WEIGHTS in self.absent
                else (': give the old ones back first, by POST /release_memory_occupation {"tags": ["weights"]}')
            )
            raise WeightsRefused(f"the new weights take about {needed} bytes, and {free} are free{remedy}")

    def _runner_of(self, version: WeightsVersion) -> ModelRunner:
        """Load a version, and make the runner that computes it on the cache there is."""
        loaded = self._load(version.source or self._own_source, [Path(one) for one in version.overlays])
        problem = _misfit(self.loaded, loaded)
        if problem:
            free_weights(loaded)
            raise WeightsRefused(problem)
        return self._make_runner(loaded)

    def _make_runner(self, loaded: LoadedModel) -> ModelRunner:
        before = self._runner
        runner = ModelRunner(loaded, before.num_blocks, before.cache.block_size, before.attention_name, before.cache)
        after = runner.backend
        if type(after) is not type(before.backend) or after.overlaps != before.backend.overlaps:
            raise WeightsRefused(
                "the new weights are computed in another way than the old ones, on K and V of another form: start a "
                "server with them"
            )
        return runner

    def _take(self, runner: ModelRunner) -> None:
        if KV_CACHE not in self.absent:
            self._record(runner)
        if self._adapters is not None:
            self._adapters.move_to(runner.backend)
        self._runner = runner
        self._use(runner)


def free_weights(loaded: LoadedModel) -> None:
    """Give back the memory of a model's weights, even where its modules are still referenced: it computes no more."""
    if loaded.stack is not None:
        loaded.stack.close()
    for module in loaded.model.modules():
        if isinstance(module, PackedLinear):
            module.packed = None
        if isinstance(module, PanelLinear):
            module.panels = module.panels[:0].copy()
        if isinstance(module, CodedEmbedding):
            # Its panels belong to no module where no head has them.
            module.linear.panels = module.linear.panels[:0].copy()
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if loaded.kept is not None:
        loaded.kept.drop()
    trim_heap()


def _misfit(before: LoadedModel, after: LoadedModel) -> str:
    """Say why a model cannot take the place of another one, on its K and V and for its clients; empty if it can."""
    facts = (
        ("architecture", before.architecture, after.architecture),
        ("vocab_size", before.vocab_size, after.vocab_size),
        ("hidden_size", before.hidden_size, after.hidden_size),
        ("number of layers", len(before.attention.layout.layers), len(after.attention.layout.layers)),
        ("attention heads", before.attention.layout, after.attention.layout),
        ("recurrent states", _states_of(before), _states_of(after)),
        ("max_position_embeddings", before.max_position, after.max_position),
        ("dtype", before.dtype, after.dtype),
        ("attention", before.attention_name, after.attention_name),
        ("row invariance", before.row_invariant, after.row_invariant),
    )
    for name, own, new in facts:
        if own != new:
            return f"the new weights have {name} {new}, and those that are served {own}: start a server with them"
    return ""


def _states_of(loaded: LoadedModel) -> StateLayout | None:
    return None if loaded.recurrent is None else loaded.recurrent.layout


def _reason(error: Exception) -> str:
    if isinstance(error, ModelRefused):
        return error.reason
    if isinstance(error, MemoryError):
        return "memory ran out while the new weights were read: give the old ones back first, or make room"
    return str(error) or type(error).__name__
