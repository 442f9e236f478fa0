"""POST /parse_function_call and /separate_reasoning: parse a text that was generated elsewhere."""

from __future__ import annotations

import asyncio

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.body.item_limits import Tools
from api_server.chat.tools import tool_use
from api_server.dialects.sglang.errors import render_error
from api_server.dialects.sglang.schema import ErrorResponse
from api_server.errors import invalid
from api_server.parsers import answer
from api_server.parsers.answer import AnswerParser, Passage
from api_server.parsers.registry import ReasoningFormat, ToolFormat, reasoning_format, tool_format
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import read_json

LONGEST_TEXT = 1 << 20


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ParseFunctionCallRequest(_Body):
    text: str = Field(max_length=LONGEST_TEXT)
    tools: Tools = Field(default_factory=list, description="As in /v1/chat/completions")
    tool_call_parser: str | None = Field(None, description="Default: the served model's")


class FunctionCall(BaseModel):
    tool_index: int = Field(description="Number of the call")
    name: str
    parameters: str = Field(description="JSON text")


class ParseFunctionCallResponse(BaseModel):
    normal_text: str
    calls: list[FunctionCall]


class SeparateReasoningRequest(_Body):
    text: str = Field(max_length=LONGEST_TEXT)
    reasoning_parser: str | None = Field(None, description="Default: the served model's")
    return_blocks: bool = False


class Block(BaseModel):
    type: str
    text: str


class SeparateReasoningResponse(BaseModel):
    """The parts of a text; the blocks come only if they are asked for."""

    reasoning_text: str
    text: str
    reasoning_blocks: list[str] | None = None
    text_blocks: list[str] | None = None
    blocks: list[Block] | None = None


_PARSE = Document(
    "The tool calls in a text",
    "sglang",
    body=ParseFunctionCallRequest,
    answer=ParseFunctionCallResponse,
    example={
        "text": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "tools": [{"type": "function", "function": {"name": "get_weather"}}],
        "tool_call_parser": "qwen25",
    },
    errors={400: ErrorResponse},
)
_SEPARATE = Document(
    "The reasoning in a text",
    "sglang",
    body=SeparateReasoningRequest,
    answer=SeparateReasoningResponse,
    example={"text": "<think>\n2 and 3 make 5.\n</think>\n\nFive.", "reasoning_parser": "qwen3"},
    errors={400: ErrorResponse},
)


def routes() -> list[Route]:
    return [
        endpoint("/parse_function_call", parse_function_call, render_error, document=_PARSE),
        endpoint("/separate_reasoning", separate_reasoning, render_error, document=_SEPARATE),
    ]


async def parse_function_call(call: Call) -> Response:
    body = await call.apart(lambda: read_json(call, ParseFunctionCallRequest))
    tools = (await call.apart(lambda: tool_use(body.tools, None))).tools or []
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    parser = AnswerParser(_tools(body.tool_call_parser, call), None, schemas)
    found = await asyncio.to_thread(answer.parse, parser, body.text)
    calls = [FunctionCall(tool_index=i, name=c.name, parameters=c.arguments) for i, c in enumerate(found.calls)]
    return _json(ParseFunctionCallResponse(normal_text=found.text, calls=calls))


async def separate_reasoning(call: Call) -> Response:
    body = read_json(call, SeparateReasoningRequest)
    parser = AnswerParser(None, _reasoning(body.reasoning_parser, call))
    found = await asyncio.to_thread(answer.parse, parser, body.text)
    response = SeparateReasoningResponse(reasoning_text=found.reasoning, text=found.text)
    if body.return_blocks:
        passages = [block for block in found.blocks if isinstance(block, Passage)]
        response.reasoning_blocks = [block.text for block in passages if block.is_thought]
        response.text_blocks = [block.text for block in passages if not block.is_thought]
        response.blocks = [Block(type="reasoning" if b.is_thought else "text", text=b.text) for b in passages]
    return _json(response)


def _tools(name: str | None, call: Call) -> ToolFormat:
    if name is None and call.server.formats.tools is not None:
        return call.server.formats.tools
    try:
        return tool_format(name or "")
    except ValueError as error:
        raise invalid(str(error).replace("tool_parser", "tool_call_parser"), "tool_call_parser") from None


def _reasoning(name: str | None, call: Call) -> ReasoningFormat:
    if name is None and call.server.formats.reasoning is not None:
        return call.server.formats.reasoning
    try:
        return reasoning_format(name or "")
    except ValueError as error:
        raise invalid(str(error), "reasoning_parser") from None


def _json(value: BaseModel) -> Response:
    return Response(value.model_dump_json(exclude_none=True), media_type="application/json")
