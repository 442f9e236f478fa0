"""Parsers of a model's answer: they separate reasoning, text and tool calls as the text comes.

`scanner.py` reads text that comes in pieces, `json_text.py` JSON in it. The formats are in `json_calls.py`,
`sectioned_calls.py`, `tagged_arguments.py`, `pythonic.py`, `reasoning.py` and `harmony.py`, by name in `registry.py`,
and found from a chat template in `detection.py`. `answer.py` is the entry for a request.
"""
