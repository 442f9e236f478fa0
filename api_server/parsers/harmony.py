"""gpt-oss: an answer is a list of messages, each in a channel and some to a recipient.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

One reader finds all of it: reasoning (analysis), calls (a recipient), and text (everything else).
"""

from __future__ import annotations

import re

from api_server.parsers.calls import Calls, is_name
from api_server.parsers.reasoning import MarkedReasoning, Markers
from api_server.parsers.scanner import CutOff, Malformed, Reading, Scanner, Thought, passage, peek, space, until

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
CONSTRAIN = "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
REASONING = Markers((f"{CHANNEL}analysis{MESSAGE}",), (END, START))
_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
_IN_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(scanner: Scanner, calls: Calls) -> Reading[None]:
    """Reads messages. Text outside of messages is plain text."""
    thoughts = 0
    while True:
        yield from space(scanner)
        if not (yield from peek(scanner, (START, CHANNEL, "to=", "assistant"))):
            if (yield from passage(scanner, _ENDS, calls.content)) is None:
                return
            continue
        try:
            header, _ = yield from until(scanner, (MESSAGE,))
        except Malformed as error:
            if isinstance(error, CutOff) and scanner.cut:
                scanner.take(len(scanner.text))
                return
            if (yield from passage(scanner, _ENDS[:-1], calls.content)) is None:
                return
            continue
        recipient = _RECIPIENT.search(header)
        channel = _IN_CHANNEL.search(header)
        if recipient is not None and is_name(recipient[1]):
            yield from _call(scanner, calls, recipient[1])
        elif channel is not None and channel[1] == "analysis":
            if thoughts:
                yield Thought("\n")
            thoughts += 1
            yield from passage(scanner, _ENDS, Thought)
        else:
            yield from passage(scanner, _ENDS, calls.content)


def _call(scanner: Scanner, calls: Calls, name: str) -> Reading[None]:
    yield calls.begin(name)
    yield from space(scanner)
    end = yield from peek(scanner, _ENDS)
    if end is not None or (scanner.ended and not scanner.text):
        yield calls.arguments("{}")
    if (yield from passage(scanner, _ENDS, calls.arguments, trim=True)) is not None or scanner.ended:
        calls.complete()


class HarmonyReasoning(MarkedReasoning):
    """Reasoning in the analysis channel."""

    markers = REASONING
    repeats = True
