"""Logits processors that a request names, in the fields of every dialect: those that the operator lists, never code.

Parameters are checked by the processor's schema, which the workers report. Knows names, schemas and JSON values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api_server.errors import RequestFailed, invalid, shown
from api_server.state import ServerState
from shared.parameter_schema import problem

_START = "start the server with --logit-processors MODULE:CLASS"
_CUSTOM = "custom_logit_processor"
_LISTED = "logits_processors"
_XARGS = "vllm_xargs"


@dataclass(frozen=True)
class AllowedProcessors:
    """The processors that clients may name: the schemas of their parameters. None: no worker has reported any yet.

    Until then names pass unchecked: the request is refused as not ready, or the worker checks it.
    """

    schemas: Mapping[str, Any] | None
    # Whether the server was started with any.
    configured: bool

    @classmethod
    def of(cls, server: ServerState) -> AllowedProcessors:
        """The processors of a server's model."""
        return cls(server.engine.model.processors, bool(server.settings.processor_entries))

    def named(
        self,
        custom: str = "",
        custom_params: Mapping[str, Any] | None = None,
        listed: Sequence[tuple[str, Mapping[str, Any]]] = (),
        xargs: Mapping[str, Any] | None = None,
        custom_field: str = "custom_params",
    ) -> dict[str, Any]:
        """Return the parameters of each processor that a request names, by name. Raises RequestFailed.

        `custom` and `custom_params` are SGLang's fields, `listed` the entries of vLLM's `logits_processors`, each with
        its parameters, and `xargs` vLLM's `vllm_xargs`: each of these goes to the processors that have a parameter of
        that name, and these take part.
        """
        found: dict[str, Any] = {}
        fields: dict[str, str] = {}
        if custom:
            self._check_name(custom, _CUSTOM)
            found[custom] = dict(custom_params or {})
            fields[custom] = custom_field
        for i, (name, parameters) in enumerate(listed):
            self._check_name(name, f"{_LISTED}[{i}]")
            if name in found:
                raise invalid(f"{_LISTED}[{i}] names {shown(name)} again: name each logits processor once", _LISTED)
            found[name] = dict(parameters)
            fields[name] = f"{_LISTED}[{i}].kwargs"
        for key, value in (xargs or {}).items():
            for name in self._takers(key, list(found)):
                found.setdefault(name, {})[key] = value
                fields.setdefault(name, _XARGS)
        for name, parameters in found.items():
            self._check_parameters(name, parameters, fields[name])
        return found

    def _check_name(self, name: str, field: str) -> None:
        if not self.configured:
            code = " Code sent by clients is never run." if _is_code(name) else ""
            text = f"The server is not configured to enable custom logit processor; {_START}, and send its name.{code}"
            raise _refused(text, field)
        if self.schemas is None or name in self.schemas:
            return
        what = f"code sent by clients is never run; {_START}, and send its name" if _is_code(name) else _unknown(name)
        raise _refused(f"{field} must name one of {', '.join(self.schemas)}; {what}.", field)

    def _takers(self, key: str, named: list[str]) -> list[str]:
        """The processors that a key of `vllm_xargs` is for: those with such a parameter, else named ones without a
        list of parameters. Raises RequestFailed if there is none."""
        if not self.configured:
            raise invalid(f"{_XARGS}.{shown(key)}: this server has no logits processors; {_START}", _XARGS)
        schemas = self.schemas or {}
        takers = [name for name, schema in schemas.items() if key in schema.get("properties", {})]
        takers = takers or [name for name in named if "properties" not in schemas.get(name, {})]
        if not takers and self.schemas is not None:
            names = {known for schema in schemas.values() for known in schema.get("properties", {})}
            listed = ", ".join(sorted(names)) or "none"
            raise invalid(f"{_XARGS}.{shown(key)} is no parameter of a logits processor; there are: {listed}", _XARGS)
        return takers

    def _check_parameters(self, name: str, parameters: Mapping[str, Any], field: str) -> None:
        schema = (self.schemas or {}).get(name)
        found = None if schema is None else problem(schema, parameters, field)
        if found is not None:
            raise _refused(found, field)


def _is_code(name: str) -> bool:
    """Whether this is what SGLang's `to_str` makes: JSON with a serialised class."""
    return name.lstrip().startswith("{")


def _unknown(name: str) -> str:
    return f"there is no {name[:100]!r}"


def _refused(text: str, field: str) -> RequestFailed:
    return invalid(text, field.partition("[")[0])
