"""What a checkpoint's files say about its quantization, and which schemes are refused by that alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.hub import cached_file

from shared.json_files import read_json_file

# Methods whose tensors are read here, by the names that configs give them.
METHODS = {
    "auto-round": "auto-round",
    "auto_round": "auto-round",
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "compressed_tensors": "compressed-tensors",
    "fbgemm_fp8": "fp8",
    "fp8": "fp8",
    "gptq": "gptq",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_fp8": "modelopt",
    "mxfp4": "mxfp4",
    "torchao": "torchao",
}
# Methods by older names.
_SYNONYMS = {"llm-awq": "awq", "intel/auto-round": "auto-round"}
# Files that named a quantization before config.json did: the method, and its names for the usual fields.
_OLDER_FILES: dict[str, tuple[str, dict[str, str]]] = {
    "quantize_config.json": ("gptq", {}),
    "quant_config.json": ("awq", {"w_bit": "bits", "q_group_size": "group_size"}),
}
_MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True)
class Scheme:
    """A method (a value of METHODS; empty where no file names one), its fields, and the file that says so."""

    method: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    file: str = "config.json"

    def get(self, name: str, default: Any = None) -> Any:
        found = self.fields.get(name)
        return default if found is None else found

    def number(self, name: str, default: int, least: int = 1) -> int:
        """Return a whole number. ValueError names a value that is none."""
        return whole_number(self.get(name, default), name, self.file, least)

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of products are meant to be rounded, as the weights were."""
        if self.method != "compressed-tensors":
            return self.method in ("fp8", "modelopt")
        groups = self.get("config_groups", {})
        found = groups.values() if isinstance(groups, Mapping) else ()
        return any(isinstance(group, Mapping) and group.get("input_activations") for group in found)


def scheme_of(source: str | Path, config: PreTrainedConfig) -> Scheme:
    """Read the scheme. ValueError for one that is not read here: it names the file, the field and the value."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        given = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if given is None:
        given = getattr(config, "compression_config", None)
    if given is not None:
        fields = dict(given if isinstance(given, Mapping) else given.to_dict())
        return _known(Scheme(_method(fields), fields))
    modelopt = _json(source, _MODELOPT_FILE)
    if modelopt is not None:
        found = modelopt.get("quantization")
        return _known(Scheme("modelopt", found if isinstance(found, Mapping) else modelopt, _MODELOPT_FILE))
    for name, (method, names) in _OLDER_FILES.items():
        older = _json(source, name)
        if older is not None and older.get("quant_method", method) == method:
            return Scheme(method, {names.get(key, key): value for key, value in older.items()}, name)
    return Scheme()


def whole_number(value: Any, field: str, file: str, least: int = 1) -> int:
    """Read a number of a file, which may be a text. ValueError names file, field and value."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text.removeprefix("-").isdecimal():
        text = int(text)
    if not isinstance(text, int) or isinstance(text, bool) or text < least:
        raise ValueError(
            f"{file} has {field} {value!r:.80}; it must be a whole number of at least {least}: download the file anew, "
            "or write the number by which its weights were quantized"
        )
    return text


def sides_of(value: Any, field: str, file: str) -> tuple[int, int]:
    """Read the outputs and inputs of a block. ValueError names file, field and value."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(
            f"{file} has {field} {value!r:.80}; it must be two whole numbers, the outputs and inputs of a block: "
            "download the file anew"
        )
    return whole_number(value[0], f"{field}[0]", file), whole_number(value[1], f"{field}[1]", file)


def _method(fields: Mapping[str, Any]) -> str:
    named = str(fields.get("quant_method") or "").lower()
    if not named and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        named = "bitsandbytes"
    return _SYNONYMS.get(named, named)


def _known(scheme: Scheme) -> Scheme:
    method = METHODS.get(scheme.method)
    if method is None:
        readable = ", ".join(sorted(set(METHODS.values())))
        raise ValueError(
            f"{scheme.file} names quant_method {scheme.method!r}, which cannot be read here; readable are {readable}: "
            "serve the unquantized model, or one that is quantized so"
        )
    known = Scheme(method, scheme.fields, scheme.file)
    algorithm = str(known.get("quant_algo", ""))
    if method == "modelopt" and algorithm.upper() not in ("", "FP8", "NVFP4", "MIXED_PRECISION"):
        raise ValueError(f"{known.file} names quant_algo {algorithm!r}; of ModelOpt's, FP8 and NVFP4 can be read here")
    return known


def _json(source: str | Path, name: str) -> dict[str, Any] | None:
    """Read an optional JSON object beside config.json."""
    path = Path(source).expanduser()
    if path.is_dir():
        found: str | None = str(path / name) if (path / name).is_file() else None
    else:
        found = cached_file(
            str(source),
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    if found is None:
        return None
    try:
        value = read_json_file(Path(found))
    except (OSError, ValueError) as error:
        raise ValueError(f"{found}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{found} must hold an object, not {type(value).__name__}")
    return value
