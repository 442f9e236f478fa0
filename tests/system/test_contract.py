"""Requests that schemathesis makes from OpenAPI documents, ours and TGI's: no 5xx, no status and no body that the
document does not know, and a server that still serves afterwards.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import response_schema_conformance

from tests.system.fuzz import LONG, MEETINGS, PAUSES, Unharmed, go_on
from tests.system.server import Server

EXAMPLES = max(1, LONG // 10) if LONG else 4
"""For each operation and mode; making one takes longer than answering it."""

TGI = json.loads((Path(__file__).parent / "tgi_openapi.json").read_text())
# TGI's server, and so ours, answers in a list here, of which its document knows nothing.
_ANSWER = TGI["paths"]["/"]["post"]["responses"]["200"]["content"]["application/json"]
_ANSWER["schema"] = {"type": "array", "items": _ANSWER["schema"], "minItems": 1, "maxItems": 1}


@pytest.fixture(scope="module", autouse=True)
def unharmed(target: Server) -> Iterator[None]:
    with Unharmed(target):
        yield


def operations(document: dict[str, Any]) -> Iterator[Any]:
    found: Iterator[Any] = schemathesis.openapi.from_dict(document).get_all_operations()
    for result in found:
        yield result.ok()


def check_all(document: dict[str, Any], mode: GenerationMode, server: Server, further: frozenset[int]) -> Counter[int]:
    """How often each status was answered."""
    answered: Counter[int] = Counter()
    for operation in operations(document):
        if operation.path not in MEETINGS and (operation.body or mode is GenerationMode.POSITIVE):
            check(operation, mode, server, further, answered)
    return answered


def check(
    operation: Any, mode: GenerationMode, server: Server, further: frozenset[int], answered: Counter[int]
) -> None:
    """`further` are statuses that the server may answer beside those of the document."""
    known = {int(code) for code in operation.definition.raw["responses"]} | further

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def send(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        response = case.call(base_url=server.url, timeout=60)
        if operation.path in PAUSES:
            go_on(server)
        answered[response.status_code] += 1
        assert response.status_code in known, (response.status_code, response.text[:500], case.body)
        if response.status_code == 200 and mode is GenerationMode.POSITIVE:
            check_body(operation, response, case)

    send()


def check_body(operation: Any, response: Any, case: Any) -> None:
    """The body of a good answer is of a type that the document names, and of its form."""
    content = operation.definition.raw["responses"]["200"].get("content")
    kind = response.headers.get("content-type", [""])[0].partition(";")[0]
    if content:
        assert kind in content
    if content and kind == "application/json":
        case.validate_response(response, checks=[response_schema_conformance])


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_our_document(target: Server, mode: GenerationMode) -> None:
    with urllib.request.urlopen(target.url + "/openapi.json", timeout=90) as response:
        document = json.load(response)
    # What is no JSON and what is too large is refused before a route sees it.
    answered = check_all(document, mode, target, frozenset({400, 413}))
    assert answered[200] >= 20 if mode is GenerationMode.POSITIVE else answered[400] >= 20


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_tgis_document(target: Server, mode: GenerationMode) -> None:
    """On paths that OpenAI's API has, errors have OpenAI's statuses."""
    answered = check_all(TGI, mode, target, frozenset({400, 404, 422}))
    assert answered[200 if mode is GenerationMode.POSITIVE else 422] > 0
