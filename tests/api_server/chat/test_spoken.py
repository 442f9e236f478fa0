"""Names of spoken answers hold their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_server.chat.messages import chat_messages
from api_server.chat.spoken import name_of, transcript_of
from api_server.errors import RequestFailed


@given(st.text())
def test_a_name_gives_the_text_back(text: str) -> None:
    assert transcript_of({"id": name_of(text)}, "audio") == text


@pytest.mark.parametrize("audio", [{"id": "audio_abc123!"}, {"id": "audio_gg"}, {"id": "x"}, {"id": 1}, {}, "audio_"])
def test_other_names_are_refused_by_their_path(audio: object) -> None:
    with pytest.raises(RequestFailed, match=r"messages\[0\].audio.id must be the id") as caught:
        chat_messages([{"role": "assistant", "audio": audio}])
    assert caught.value.field == "messages[0].audio.id"


def test_content_is_kept_and_users_have_no_spoken_answers() -> None:
    (message,) = chat_messages([{"role": "assistant", "content": "kept", "audio": {"id": name_of("other")}}])
    assert message.content == "kept"
    with pytest.raises(RequestFailed, match="of others than the assistant"):
        chat_messages([{"role": "user", "content": "x", "audio": {"id": name_of("x")}}])
