"""Every name of the two interface documents, and every member, as `documents.json` lists them.

The list has the documents' names, members, defaults and values; where the documents contradict each other it has what
was decided. "required" is a field without a default, "any" a default that is made anew for each object.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import typing
from abc import ABC
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from pydantic import BaseModel

import interfaces
from interfaces.request.sampling import SamplingParams

DOCUMENTS = json.loads((Path(__file__).parent / "documents.json").read_text())
CASES = [
    pytest.param(name, entry, id=f"{document}-{name}")
    for document, names in DOCUMENTS.items()
    for name, entry in names.items()
]

KINDS: Mapping[str, Callable[[Any], bool]] = {
    "dataclass": dataclasses.is_dataclass,
    "pydantic model": lambda it: issubclass(it, BaseModel),
    "typed dict": typing.is_typeddict,
    "protocol": lambda it: getattr(it, "_is_protocol", False) and getattr(it, "_is_runtime_protocol", False),
    "abstract class": lambda it: issubclass(it, ABC) and inspect.isabstract(it),
    "class": inspect.isclass,
    "enum": lambda it: issubclass(it, enum.Enum) and not issubclass(it, str),
    "string enum": lambda it: issubclass(it, enum.Enum) and issubclass(it, str),
    "string": lambda it: issubclass(it, str),
    "type variable": lambda it: isinstance(it, TypeVar),
    "alias": lambda it: typing.get_origin(it) is not None,
    "constant": lambda it: isinstance(it, str),
    "function": inspect.isfunction,
}


def test_the_documents_have_27_and_79_names() -> None:
    assert [len(names) for names in DOCUMENTS.values()] == [27, 79]


@pytest.mark.parametrize(("name", "entry"), CASES)
def test_a_name_and_its_members(name: str, entry: dict[str, Any]) -> None:
    subject = getattr(interfaces, name)
    assert name in interfaces.__all__
    assert KINDS[entry["kind"]](subject)
    for aspect, expected in entry.items():
        CHECKS[aspect](subject, expected)


def _check_fields(subject: Any, expected: dict[str, str]) -> None:
    if typing.is_typeddict(subject):
        assert set(typing.get_type_hints(subject)) == set(expected)
        return
    parameters = inspect.signature(subject).parameters
    for name, default in expected.items():
        assert name in parameters, name
        found = _default(subject, name, parameters[name])
        if default == "any":
            assert found != "required", name
        else:
            assert found == default, f"{name} is {found} by default, not {default}"


def _default(subject: Any, name: str, parameter: inspect.Parameter) -> str:
    """The default as source text."""
    if issubclass(subject, BaseModel):
        field = subject.model_fields[name]
        return "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
    declared = {field.name: field for field in dataclasses.fields(subject)}.get(name)
    if declared is not None and declared.default_factory is not dataclasses.MISSING:
        return repr(declared.default_factory())
    return "required" if parameter.default is inspect.Parameter.empty else repr(parameter.default)


def _check_properties(subject: Any, expected: list[str]) -> None:
    fields = {field.name for field in dataclasses.fields(subject)} if dataclasses.is_dataclass(subject) else set()
    annotated = {name for base in subject.__mro__ for name in getattr(base, "__annotations__", {})}
    for name in expected:
        if name not in fields | annotated:
            member = inspect.getattr_static(subject, name)
            assert not inspect.isfunction(member), f"{name} is a method"


def _check_methods(subject: Any, expected: dict[str, list[str]]) -> None:
    for label, parameters in expected.items():
        *words, name = label.split()
        member = getattr(subject, name)
        signature = inspect.signature(member).parameters
        assert inspect.iscoroutinefunction(member) is ("async" in words), name
        assert inspect.ismethod(member) is ("classmethod" in words), name
        named = [each for each in signature if each != "self"]
        wanted = [parameter.lstrip("*") for parameter in parameters]
        assert named[: len(wanted)] == wanted, name
        further = [signature[each] for each in named[len(wanted) :]]
        assert all(each.default is not inspect.Parameter.empty for each in further), name


def _check_members(subject: Any, expected: dict[str, str]) -> None:
    assert {member.name: member.value for member in subject} == expected


def _check_variance(subject: TypeVar, expected: str) -> None:
    variances = {(False, False): "invariant", (True, False): "covariant", (False, True): "contravariant"}
    assert variances[subject.__covariant__, subject.__contravariant__] == expected


def _check_bound(subject: TypeVar, expected: str) -> None:
    assert subject.__bound__ is getattr(interfaces, expected)


def _check_value(subject: str, expected: str) -> None:
    assert subject == expected


def _check_params(subject: Callable[..., Any], expected: list[str]) -> None:
    assert list(inspect.signature(subject).parameters)[: len(expected)] == expected


CHECKS: Mapping[str, Callable[[Any, Any], None]] = {
    "kind": lambda _subject, _expected: None,
    "fields": _check_fields,
    "properties": _check_properties,
    "methods": _check_methods,
    "members": _check_members,
    "variance": _check_variance,
    "bound": _check_bound,
    "value": _check_value,
    "params": _check_params,
}


def test_both_faces_of_the_text_context_have_the_members() -> None:
    def members(name: str) -> list[str]:
        entry = DOCUMENTS["first" if name == "InputContext" else "second"][name]
        return [*entry["properties"], *entry["methods"]]

    context = interfaces.TextContext(tokens=interfaces.TokenBuffer(np.array([1, 2])), max_length=9)
    face = context.as_input_context()
    assert isinstance(context, interfaces.TextGenerationContext)
    assert isinstance(face, interfaces.InputContext)
    for name in members("TextGenerationContext"):
        getattr(context, name)
    face.assign_to_cache(3)
    for name in members("InputContext"):
        getattr(face, name)


def test_aliases_and_defaults_that_the_list_cannot_say() -> None:
    assert interfaces.EmbeddingsOutput is interfaces.EmbeddingsGenerationOutput
    assert typing.get_origin(interfaces.PipelineOutputsDict) is dict
    assert set(typing.get_args(interfaces.MessageContent)) == {
        interfaces.TextContentPart,
        interfaces.ImageContentPart,
        interfaces.VideoContentPart,
        # Of ours: the documents have no sounds in conversations.
        interfaces.SoundContentPart,
    }
    assert SamplingParams().seed != SamplingParams().seed
    assert interfaces.AudioGenerationOutput(interfaces.GenerationStatus.ACTIVE, 0).audio_data.dtype == np.float32
    assert len(interfaces.RequestID()) == 32
