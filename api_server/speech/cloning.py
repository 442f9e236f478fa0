"""Voices by clips of sound: a clip is read by the media process, the worker's codec makes its codes, and the model goes
on from them.

A voice that comes again is not encoded again. Knows no dialects.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from api_server.chat.images import Budget, bytes_of
from api_server.chat.sounds import source_of
from api_server.engine import scheduling
from api_server.errors import ErrorKind, RequestFailed, invalid
from api_server.media.clips import Clip
from api_server.media.voice_clips import MOST_BYTES
from api_server.speech.wish import Wish
from api_server.state import ServerState
from api_server.text.speaking_model import SpeakingModel
from api_server.web.endpoint import Call
from interfaces import ClipContext, RequestID
from shared.speech_tokens import Voice

_FIELD = "ref_audio"


def check_clip(server: ServerState, wish: Wish) -> None:
    """Refuses a clip where none can be had. Raises RequestFailed."""
    if not wish.ref_audio:
        if wish.ref_text:
            raise invalid("ref_text must go with ref_audio, whose words it says: send both, or none", "ref_text")
        return
    if server.speaking is None:
        raise RequestFailed(
            ErrorKind.UNSUPPORTED,
            f"{_FIELD}: this model has voices of its own only: leave the field out, or serve a model that generates "
            "speech tokens",
            field=_FIELD,
        )
    if not server.settings.voice_clips:
        raise RequestFailed(
            ErrorKind.UNSUPPORTED,
            f"{_FIELD}: voices by clip are off on this server: leave the field out, or ask its operator to start it "
            "with --voice-clips",
            field=_FIELD,
        )
    if not wish.ref_text.strip():
        raise invalid("ref_text must be the words that are spoken in ref_audio: the model reads them, too", "ref_text")


async def voice_of_clip(call: Call, model: SpeakingModel, wish: Wish) -> Voice:
    """The voice of the wish's clip, whose time counts as the request's. Raises RequestFailed that names the field."""
    model.refuse_control(wish.ref_text, "ref_text")
    async with scheduling.spending("its clip"):
        codes = await _codes(call, wish)
    width = model.files.width
    limit = call.server.max_model_len
    if limit is not None and len(codes) + width >= limit:
        raise RequestFailed(
            ErrorKind.TOO_LONG,
            f"{_FIELD} takes {len(codes)} tokens, and {limit} are possible with the text and its speech: send a "
            "shorter clip",
            field=_FIELD,
        )
    tokens = [code + model.zeros[i % width] for i, code in enumerate(codes)]
    voice = replace(model.voice(wish.voice), tokens=tuple(tokens), transcript=wish.ref_text.strip())
    # The words of the clip are in the prompt of each sentence, too.
    (least,) = model.prompts(["a"], voice, "")
    if limit is not None and len(least) + width > limit:
        raise RequestFailed(
            ErrorKind.TOO_LONG,
            f"ref_text and the clip take {len(least)} tokens with a text of one letter, and {limit} are possible with "
            "its speech: send a shorter clip with fewer words",
            field="ref_text",
        )
    return voice


async def _codes(call: Call, wish: Wish) -> list[int]:
    """The codes of the wish's clip. Raises RequestFailed."""
    server = call.server
    source = source_of(wish.ref_audio, _FIELD)
    (data,) = await bytes_of(server, [source], Budget("sound", MOST_BYTES, MOST_BYTES, _FIELD))
    clip = await server.media.voice_clips.read(data, _FIELD)
    codes = server.media.voice_clips.codes(clip.digest)
    if codes is None:
        codes = await _encoded(call, clip)
        server.media.voice_clips.keep(clip.digest, codes)
    return codes


async def _encoded(call: Call, clip: Clip) -> list[int]:
    samples = np.ascontiguousarray(clip.features.reshape(-1))
    context = ClipContext.of_samples(samples, RequestID(call.request_id), call.server.model_name)
    values = await call.server.engine.pool(context, scheduling.current.get())
    found: list[int] = values.array[:, 0].astype(np.int64).tolist()
    return found
