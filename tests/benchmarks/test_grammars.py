"""The schemas that compiling is measured with are valid, different, and can be enforced."""

from __future__ import annotations

import json

import jsonschema

from benchmarks.grammars import SCHEMAS, realistic_schemas
from tests.api_server.constraints.vocabulary import compiled


def test_the_schemas() -> None:
    schemas = realistic_schemas(SCHEMAS)
    assert len({json.dumps(schema) for schema in schemas}) == SCHEMAS
    assert realistic_schemas(SCHEMAS) == schemas
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)
        assert compiled("json_schema", schema)
