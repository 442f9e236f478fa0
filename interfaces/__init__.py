"""The nouns of the system and the wire between its processes: types that cross a process, and nothing else.

A module is loaded when one of its names is first used, so that a process pays only for what it needs. None of them
pulls in torch, zmq, starlette or transformers.
"""

# ruff: noqa: F403 (type checkers see the stars; what is public is said below)

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interfaces.adapters import *
    from interfaces.audio import *
    from interfaces.chat import *
    from interfaces.codec import *
    from interfaces.constraint import *
    from interfaces.context import *
    from interfaces.generation_output import *
    from interfaces.generators import *
    from interfaces.grammar_state import GrammarEnforcementSnapshot as GrammarEnforcementSnapshot
    from interfaces.inputs import *
    from interfaces.log_probabilities import LogProbabilities as LogProbabilities
    from interfaces.lora import *
    from interfaces.media_contexts import *
    from interfaces.messages import *
    from interfaces.open_responses import *
    from interfaces.outputs import *
    from interfaces.parsers import *
    from interfaces.pipeline import *
    from interfaces.processors import *
    from interfaces.request_id import *
    from interfaces.requests import *
    from interfaces.results import *
    from interfaces.sampling import *
    from interfaces.shared_memory import SharedMemoryArray as SharedMemoryArray
    from interfaces.status import *
    from interfaces.stopping import EOSTracker as EOSTracker
    from interfaces.text_context import TextContext as TextContext
    from interfaces.tokens import *
    from interfaces.vision_context import *

_PUBLIC = """
adapters: AudioGeneratorPipeline EmbeddingsGeneratorPipeline PipelineAudioGenerator PipelineEmbeddingsGenerator
    PipelineTokenGenerator TokenGeneratorPipeline
audio: AudioGenerationMetadata AudioGenerationOutput AudioGenerationRequest AudioGenerationResponse
    AudioGeneratorOutput
chat: ImageContentPart MessageContent TextContentPart TextGenerationRequestFunction TextGenerationRequestMessage
    TextGenerationRequestTool TextGenerationResponseFormat VideoContentPart
codec: WireError decode encode msgpack_numpy_decoder msgpack_numpy_encoder
constraint: Constraint ConstraintKind
context: AudioGenerationContext AudioGenerationContextType AudioGeneratorContext BaseContext BaseContextType
    EmbeddingsContext EmbeddingsGenerationContextType EmbeddingsGeneratorContext InputContext PixelGenerationContext
    PixelGenerationContextType SpecDecodingState TextGenerationContext TextGenerationContextType VLMContextType
    VLMTextGenerationContext
generation_output: GenerationOutput OutputContent
generators: AudioGenerator EmbeddingsGenerator PipelinesFactory TokenGenerator
grammar_state: GrammarEnforcementSnapshot
hidden_states: HiddenStates
inputs: AudioGenerationInputs EmbeddingsGenerationInputs PixelGenerationInputs TextGenerationInputs
log_probabilities: LogProbabilities
lora: LORA_REQUEST_ENDPOINT LORA_RESPONSE_ENDPOINT LoRAOperation LoRARequest LoRAResponse LoRAStatus LoRAType
media_contexts: PixelContext SpeechContext
messages: Action Cancel Detach Finish Goodbye Hello Inquiry InquiryAnswer Join Order OrderAnswer Results Retire
    RowGrammar SessionAction SessionAnswer SessionOrder Status Step StepResult Submit Terms Unknown WorkerGoodbye
    WorkerHello WorkerStatus
open_responses: OpenResponsesRequest OpenResponsesRequestBody ResponseResource
outputs: EmbeddingsGenerationOutput EmbeddingsOutput TextGenerationOutput
parsers: ParsedReasoningDelta ParsedToolCall ParsedToolCallDelta ParsedToolResponse ReasoningParser ReasoningSpan
    ToolParser
pipeline: Pipeline PipelineInputs PipelineInputsType PipelineOutput PipelineOutputType PipelineOutputsDict
    PipelineTokenizer TokenizerEncoded UnboundContextType
processors: BatchLogitsProcessor BatchProcessorInputs LogitsProcessor ProcessorInputs
request_id: DUMMY_REQUEST_ID Request RequestID RequestType
requests: EmbeddingsGenerationRequest PixelGenerationRequest TextGenerationRequest
results: ErrorCode RequestError SchedulerResult
sampling: LogprobMode SamplingParams SamplingParamsGenerationConfigDefaults SamplingParamsInput combine
shared_memory: SharedMemoryArray
status: BatchType GenerationStatus InputModality PipelineTask SchedulerStatus
stopping: EOSTracker
text_context: TextContext
tokens: Range TokenBuffer TokenSlice
vision_context: ImageMetadata TextAndVisionContext
"""


def _modules_by_name() -> dict[str, str]:
    modules: dict[str, str] = {}
    for word in _PUBLIC.split():
        if word.endswith(":"):
            module = word.removesuffix(":")
        else:
            modules[word] = module
    return modules


_MODULE_OF = _modules_by_name()

__all__ = tuple(_MODULE_OF)


if not TYPE_CHECKING:  # or every name would be there, as Any

    def __getattr__(name: str) -> Any:
        module = _MODULE_OF.get(name)
        if module is None:
            raise AttributeError(f"module 'interfaces' has no attribute {name!r}")
        value = getattr(import_module(f"interfaces.{module}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
