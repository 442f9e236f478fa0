"""The logits processors that the operator allows, by name: where they are found, their forms and their parameters.

An entry of the setting is MODULE:CLASS or NAME=MODULE:CLASS, a MODULE with a dict LOGITS_PROCESSORS of classes by name,
the name of an entry point of installed packages (group `tokenyard.logits_processors`), or `installed`: all of these.
Nothing but this setting makes code run. Knows neither rows nor steps.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch

from shared.parameter_schema import check_schema, problem

# The group of entry points in which packages offer processors.
ENTRY_POINTS = "tokenyard.logits_processors"
# The entry that means all processors that installed packages offer.
ALL_INSTALLED = "installed"
# The name of a module's dict of processors.
OFFERED = "LOGITS_PROCESSORS"
# vLLM's constructor takes the most requests of a batch: processors of that form get this number.
MOST_SLOTS = 4096
# Parameters may be any object, where a processor has no schema.
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


class ProcessorForm(Enum):
    """How a processor is made and called. The signatures of the class and of its `__call__` tell.

    REQUEST is made for each request, from its parameters, and called with `ProcessorInputs`. BATCH is made once,
    without arguments, and called once a step with `BatchProcessorInputs`. LOGITS is made once, and called as SGLang's:
    `processor(logits [rows, vocab], parameters of each row) -> logits`. SLOTS is made once, as vLLM's: of a config, a
    device and whether memory is pinned. It hears of requests by `update_state`, and `apply` changes the logits of all.
    """

    REQUEST = "request"
    BATCH = "batch"
    LOGITS = "logits"
    SLOTS = "slots"


@dataclass(frozen=True)
class Processor:
    """One processor. `call` makes those of the form REQUEST, and is the processor itself in the other forms."""

    form: ProcessorForm
    call: Callable[..., Any]
    schema: Mapping[str, Any]
    # The largest logit stays the largest: greedy rows need not run it.
    keeps_largest: bool

    def read(self, name: str, parameters: str) -> dict[str, Any]:
        """Read a request's parameters, which are JSON text. ValueError names the one that the schema refuses."""
        try:
            values = json.loads(parameters) if parameters else {}
        except ValueError:
            raise ValueError(f"the parameters of the logits processor {name!r} must be JSON") from None
        found = problem(self.schema, values, f"parameters of the logits processor {name!r}")
        if found is not None:
            raise ValueError(found)
        return dict(values)


def load_processors(entries: Iterable[str] | Mapping[str, str]) -> dict[str, Processor]:
    """Load processors by name, in the order of the entries of the setting, or of paths `module:Class` by name.

    ValueError names the entry that cannot be used, and says why.
    """
    if isinstance(entries, Mapping):
        entries = [f"{name}={path}" for name, path in entries.items()]
    found: dict[str, Processor] = {}
    for entry in entries:
        for name, made in _offered(entry):
            if name in found:
                remedy = "give one another name, as NAME=MODULE:CLASS"
                raise ValueError(f"there are two logits processors {name!r}: {remedy}")
            found[name] = _processor(entry if name in entry else f"{name} ({entry})", made)
    return found


def read_all(processors: Mapping[str, Processor], named: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Read the parameters of the processors that a request names, in the operator's order.

    ValueError for a name that is not among them, and for parameters that a schema refuses.
    """
    unknown = [name for name in named if name not in processors]
    if unknown:
        known = ", ".join(processors) or "none"
        raise ValueError(f"the logits processor {unknown[0][:100]!r} is not allowed; allowed are: {known}")
    return {name: processor.read(name, named[name]) for name, processor in processors.items() if name in named}


def check_named(processors: Mapping[str, Processor], named: Mapping[str, str], whose: str) -> None:
    """Check the processors that a request names. ValueError begins with `whose`."""
    try:
        read_all(processors, named)
    except ValueError as error:
        raise ValueError(f"{whose}{error}") from None


def schemas(processors: Mapping[str, Processor]) -> dict[str, str]:
    """Return the schemas of the parameters, as JSON text, by name."""
    return {name: json.dumps(dict(processor.schema)) for name, processor in processors.items()}


def _offered(entry: str) -> list[tuple[str, Any]]:
    """Return the classes of an entry, each with its name. ValueError names the entry."""
    name, _, path = entry.rpartition("=")
    if ":" in path:
        module, _, attribute = path.partition(":")
        return [(name or path, _attribute(module, attribute, path))]
    points = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if entry == ALL_INSTALLED:
        return [(each, _loaded(point)) for each, point in sorted(points.items())]
    if entry in points:
        return [(entry, _loaded(points[entry]))]
    offered = _attribute(entry, OFFERED, entry)
    if not isinstance(offered, Mapping) or not all(isinstance(each, str) for each in offered):
        raise ValueError(f"{entry}.{OFFERED} must be a dict of classes by name")
    return list(offered.items())


def _attribute(module: str, attribute: str, entry: str) -> Any:
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the operator's code raises
        raise ValueError(f"the logits processor {entry} cannot be loaded: {error}") from error


def _loaded(point: metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:  # whatever the package's code raises
        raise ValueError(f"the logits processor {point.name} ({point.value}) cannot be loaded: {error}") from error


def _processor(name: str, made: Any) -> Processor:
    if not callable(made):
        raise ValueError(f"the logits processor {name} cannot be called: name a class")
    schema = getattr(made, "parameter_schema", _ANY_OBJECT)
    try:
        check_schema(schema)
        # It goes to the API processes as JSON.
        json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the logits processor {name} has no usable parameter_schema: {error}") from None
    keeps_largest = bool(getattr(made, "keeps_largest", False))
    if hasattr(made, "update_state") and hasattr(made, "apply"):
        return _slot_processor(name, made, schema)
    if _arguments(made, name)[0]:
        return Processor(ProcessorForm.REQUEST, made, schema, keeps_largest)
    try:
        instance = made()
    except Exception as error:  # whatever the operator's code raises
        raise ValueError(f"the logits processor {name} cannot be made: {error}") from error
    if not callable(instance):
        raise ValueError(f"the logits processor {name} cannot be called: it has no __call__")
    # SGLang's second argument has a default.
    form = ProcessorForm.BATCH if _arguments(instance, name)[1] == 1 else ProcessorForm.LOGITS
    return Processor(form, instance, schema, keeps_largest)


def _slot_processor(name: str, made: Any, schema: Mapping[str, Any]) -> Processor:
    """Make a processor of vLLM's form. Of vLLM's config there is what bounds a batch."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=MOST_SLOTS))
    try:
        instance = made(config, torch.device("cpu"), False)
        keeps_largest = bool(instance.is_argmax_invariant())
    except Exception as error:  # whatever the operator's code raises
        raise ValueError(f"the logits processor {name} cannot be made: {error}") from error
    return Processor(ProcessorForm.SLOTS, instance, schema, keeps_largest)


def _arguments(called: Callable[..., Any], name: str) -> tuple[int, int]:
    """Return how many positional arguments a call must have, and how many it may have."""
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the logits processor {name} has no signature that can be read: {error}") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [each for each in parameters if each.kind in kinds]
    needed = [each for each in given if each.default is inspect.Parameter.empty]
    if len(needed) > 2:
        names = ", ".join(each.name for each in needed)
        raise ValueError(
            f"the logits processor {name} takes {names}: see docs/logits_processors.md for what it may take"
        )
    return len(needed), len(given)
