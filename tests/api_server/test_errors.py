"""Errors of requests have the names of fields that the client's dialect has."""

from __future__ import annotations

from api_server.errors import ErrorKind, RequestFailed, invalid


def test_only_the_field_is_renamed_and_no_value_that_has_its_name() -> None:
    error = invalid("voice 'my voice' is unknown: this model has voice_1, voice_2", "voice")
    renamed = error.renamed({"voice": "audio.voice"})
    assert renamed.field == "audio.voice"
    assert renamed.message == "audio.voice 'my voice' is unknown: this model has voice_1, voice_2"


def test_a_renamed_error_keeps_what_it_knew() -> None:
    error = RequestFailed(
        ErrorKind.OVERLOADED, "prompt is too much", field="prompt", retry_after=3, numbers={"limit": 5}, counted=True
    )
    renamed = error.renamed({"prompt": "input"})
    assert vars(renamed) == vars(error) | {"field": "input", "message": "input is too much"}
