"""How a query and a document become the text of a decoder that reranks.

A decoder reads one text, whose form it was trained on: a chat template with roles for the query and the document, or
the form that Qwen3-Reranker's authors publish. Scores without that form are wrong. Knows no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Stand-ins for the parts of a chat template. Templates copy such characters as they are.
_QUERY = "\ue000query\ue000"
_DOCUMENT = "\ue000document\ue000"
_INSTRUCTION = "\ue000instruction\ue000"

# Qwen3-Reranker's published form.
_QWEN_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_QWEN_PREFIX = f"<|im_start|>system\n{_QWEN_SYSTEM}<|im_end|>\n<|im_start|>user\n"
_QWEN_BODY = f"<Instruct>: {_INSTRUCTION}\n<Query>: {_QUERY}\n<Document>: {_DOCUMENT}"
_QWEN_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_QWEN_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class PairTemplate:
    """A text in three parts that are tokenized one by one, without special tokens: `prefix`, a body, and `suffix`.

    The document is the end of the body, so a body that is too long is cut there. `plain` is the body without an
    instruction, and `instructed` the one with it; the parts stand in them by name.
    """

    prefix: str
    suffix: str
    plain: str
    instructed: str

    def body(self, query: str, document: str, instruction: str | None = None) -> str:
        """Return the part of the text that depends on the request."""
        form = self.plain if instruction is None else self.instructed
        parts = {_QUERY: query, _DOCUMENT: document, _INSTRUCTION: instruction or ""}
        # A text may hold the stand-in of another part, so each part is put in once, at its place in the form.
        places = sorted((form.index(name), name) for name in parts if name in form)
        pieces: list[str] = []
        end = 0
        for place, name in places:
            pieces += [form[end:place], parts[name]]
            end = place + len(name)
        return "".join([*pieces, form[end:]])


def qwen_template() -> PairTemplate:
    """Return the form of Qwen3-Reranker."""
    plain = _QWEN_BODY.replace(_INSTRUCTION, _QWEN_INSTRUCTION)
    return PairTemplate(_QWEN_PREFIX, _QWEN_SUFFIX, plain, _QWEN_BODY)


def chat_pair(template: str) -> PairTemplate | None:
    """Return the form that a chat template gives to messages of the roles query and document; None if it has none.

    An instruction is a system message before them.
    """
    if '"query"' not in template and "'query'" not in template:
        return None
    for structured in (False, True):
        plain = _rendered(template, (("query", _QUERY), ("document", _DOCUMENT)), structured)
        if _QUERY in plain and _DOCUMENT in plain.partition(_QUERY)[2]:
            break
    else:
        return None
    roles = (("system", _INSTRUCTION), ("query", _QUERY), ("document", _DOCUMENT))
    instructed = _rendered(template, roles, structured)
    if _QUERY not in instructed or _DOCUMENT not in instructed:
        instructed = plain
    suffix = plain.partition(_DOCUMENT)[2]
    return PairTemplate("", suffix, *(form.partition(_DOCUMENT)[0] + _DOCUMENT for form in (plain, instructed)))


def _rendered(template: str, messages: Sequence[tuple[str, str]], structured: bool) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    contents = [(role, [{"type": "text", "text": text}] if structured else text) for role, text in messages]
    try:
        return environment.from_string(template).render(
            messages=[{"role": role, "content": content} for role, content in contents], add_generation_prompt=True
        )
    except (TemplateError, TypeError):
        return ""  # a template that has no place for these roles
