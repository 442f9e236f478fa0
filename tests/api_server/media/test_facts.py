"""What a model's files say of images is read once, and from configs alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from api_server.errors import ErrorKind, RequestFailed
from api_server.media.facts import ImageFacts


async def test_a_gguf_file_is_not_read_as_a_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real one has gigabytes. This one would tell of a tower, if it were read."""
    file = tmp_path / "model.gguf"
    file.write_text('{"vision_config": {}}')
    facts = ImageFacts(str(file))
    with caplog.at_level("INFO", "tokenyard"):
        await facts.warm()
    assert not caplog.messages
    with pytest.raises(RequestFailed, match="takes no images on this server: a GGUF file") as refused:
        await facts.read()
    assert refused.value.kind is ErrorKind.UNSUPPORTED
