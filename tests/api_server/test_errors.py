"""Errors of requests have the names of fields that the client's dialect has."""

from __future__ import annotations

from api_server.errors import invalid


def test_only_the_field_is_renamed_and_no_value_that_has_its_name() -> None:
    error = invalid("voice 'my voice' is unknown: this model has voice_1, voice_2", "voice")
    renamed = error.renamed({"voice": "audio.voice"})
    assert renamed.field == "audio.voice"
    assert renamed.message == "audio.voice 'my voice' is unknown: this model has voice_1, voice_2"
