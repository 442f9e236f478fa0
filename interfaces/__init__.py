"""The nouns of the system and the wire between its processes: types that cross a process, and nothing else.

A module is loaded when one of its names is first used, so that a process pays only for what it needs. None of them
pulls in torch, zmq, starlette or transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interfaces.adapters import (
        AudioGeneratorPipeline as AudioGeneratorPipeline,
    )
    from interfaces.adapters import (
        EmbeddingsGeneratorPipeline as EmbeddingsGeneratorPipeline,
    )
    from interfaces.adapters import (
        PipelineAudioGenerator as PipelineAudioGenerator,
    )
    from interfaces.adapters import (
        PipelineEmbeddingsGenerator as PipelineEmbeddingsGenerator,
    )
    from interfaces.adapters import (
        PipelineTokenGenerator as PipelineTokenGenerator,
    )
    from interfaces.adapters import (
        TokenGeneratorPipeline as TokenGeneratorPipeline,
    )
    from interfaces.audio import (
        AudioGenerationMetadata as AudioGenerationMetadata,
    )
    from interfaces.audio import (
        AudioGenerationOutput as AudioGenerationOutput,
    )
    from interfaces.audio import (
        AudioGenerationRequest as AudioGenerationRequest,
    )
    from interfaces.audio import (
        AudioGenerationResponse as AudioGenerationResponse,
    )
    from interfaces.audio import (
        AudioGeneratorOutput as AudioGeneratorOutput,
    )
    from interfaces.chat import (
        ImageContentPart as ImageContentPart,
    )
    from interfaces.chat import (
        MessageContent as MessageContent,
    )
    from interfaces.chat import (
        TextContentPart as TextContentPart,
    )
    from interfaces.chat import (
        TextGenerationRequestFunction as TextGenerationRequestFunction,
    )
    from interfaces.chat import (
        TextGenerationRequestMessage as TextGenerationRequestMessage,
    )
    from interfaces.chat import (
        TextGenerationRequestTool as TextGenerationRequestTool,
    )
    from interfaces.chat import (
        TextGenerationResponseFormat as TextGenerationResponseFormat,
    )
    from interfaces.chat import (
        VideoContentPart as VideoContentPart,
    )
    from interfaces.codec import (
        WireError as WireError,
    )
    from interfaces.codec import (
        decode as decode,
    )
    from interfaces.codec import (
        encode as encode,
    )
    from interfaces.codec import (
        msgpack_numpy_decoder as msgpack_numpy_decoder,
    )
    from interfaces.codec import (
        msgpack_numpy_encoder as msgpack_numpy_encoder,
    )
    from interfaces.context import (
        AudioGenerationContext as AudioGenerationContext,
    )
    from interfaces.context import (
        AudioGenerationContextType as AudioGenerationContextType,
    )
    from interfaces.context import (
        BaseContext as BaseContext,
    )
    from interfaces.context import (
        BaseContextType as BaseContextType,
    )
    from interfaces.context import (
        EmbeddingsContext as EmbeddingsContext,
    )
    from interfaces.context import (
        EmbeddingsGenerationContextType as EmbeddingsGenerationContextType,
    )
    from interfaces.context import (
        InputContext as InputContext,
    )
    from interfaces.context import (
        PixelGenerationContext as PixelGenerationContext,
    )
    from interfaces.context import (
        PixelGenerationContextType as PixelGenerationContextType,
    )
    from interfaces.context import (
        SpecDecodingState as SpecDecodingState,
    )
    from interfaces.context import (
        TextGenerationContext as TextGenerationContext,
    )
    from interfaces.context import (
        TextGenerationContextType as TextGenerationContextType,
    )
    from interfaces.context import (
        VLMContextType as VLMContextType,
    )
    from interfaces.context import (
        VLMTextGenerationContext as VLMTextGenerationContext,
    )
    from interfaces.generation_output import (
        GenerationOutput as GenerationOutput,
    )
    from interfaces.generation_output import (
        OutputContent as OutputContent,
    )
    from interfaces.generators import (
        AudioGenerator as AudioGenerator,
    )
    from interfaces.generators import (
        EmbeddingsGenerator as EmbeddingsGenerator,
    )
    from interfaces.generators import (
        PipelinesFactory as PipelinesFactory,
    )
    from interfaces.generators import (
        TokenGenerator as TokenGenerator,
    )
    from interfaces.grammar_state import (
        GrammarEnforcementSnapshot as GrammarEnforcementSnapshot,
    )
    from interfaces.inputs import (
        AudioGenerationInputs as AudioGenerationInputs,
    )
    from interfaces.inputs import (
        EmbeddingsGenerationInputs as EmbeddingsGenerationInputs,
    )
    from interfaces.inputs import (
        PixelGenerationInputs as PixelGenerationInputs,
    )
    from interfaces.inputs import (
        TextGenerationInputs as TextGenerationInputs,
    )
    from interfaces.log_probabilities import (
        LogProbabilities as LogProbabilities,
    )
    from interfaces.lora import (
        LORA_REQUEST_ENDPOINT as LORA_REQUEST_ENDPOINT,
    )
    from interfaces.lora import (
        LORA_RESPONSE_ENDPOINT as LORA_RESPONSE_ENDPOINT,
    )
    from interfaces.lora import (
        LoRAOperation as LoRAOperation,
    )
    from interfaces.lora import (
        LoRARequest as LoRARequest,
    )
    from interfaces.lora import (
        LoRAResponse as LoRAResponse,
    )
    from interfaces.lora import (
        LoRAStatus as LoRAStatus,
    )
    from interfaces.lora import (
        LoRAType as LoRAType,
    )
    from interfaces.media_contexts import (
        PixelContext as PixelContext,
    )
    from interfaces.media_contexts import (
        SpeechContext as SpeechContext,
    )
    from interfaces.messages import (
        Cancel as Cancel,
    )
    from interfaces.messages import (
        Finish as Finish,
    )
    from interfaces.messages import (
        Goodbye as Goodbye,
    )
    from interfaces.messages import (
        Hello as Hello,
    )
    from interfaces.messages import (
        Join as Join,
    )
    from interfaces.messages import (
        Results as Results,
    )
    from interfaces.messages import (
        Status as Status,
    )
    from interfaces.messages import (
        Step as Step,
    )
    from interfaces.messages import (
        StepResult as StepResult,
    )
    from interfaces.messages import (
        Submit as Submit,
    )
    from interfaces.messages import (
        WorkerHello as WorkerHello,
    )
    from interfaces.messages import (
        WorkerStatus as WorkerStatus,
    )
    from interfaces.open_responses import (
        OpenResponsesRequest as OpenResponsesRequest,
    )
    from interfaces.open_responses import (
        OpenResponsesRequestBody as OpenResponsesRequestBody,
    )
    from interfaces.open_responses import (
        ResponseResource as ResponseResource,
    )
    from interfaces.outputs import (
        EmbeddingsGenerationOutput as EmbeddingsGenerationOutput,
    )
    from interfaces.outputs import (
        EmbeddingsOutput as EmbeddingsOutput,
    )
    from interfaces.outputs import (
        TextGenerationOutput as TextGenerationOutput,
    )
    from interfaces.parsers import (
        ParsedReasoningDelta as ParsedReasoningDelta,
    )
    from interfaces.parsers import (
        ParsedToolCall as ParsedToolCall,
    )
    from interfaces.parsers import (
        ParsedToolCallDelta as ParsedToolCallDelta,
    )
    from interfaces.parsers import (
        ParsedToolResponse as ParsedToolResponse,
    )
    from interfaces.parsers import (
        ReasoningParser as ReasoningParser,
    )
    from interfaces.parsers import (
        ReasoningSpan as ReasoningSpan,
    )
    from interfaces.parsers import (
        ToolParser as ToolParser,
    )
    from interfaces.pipeline import (
        Pipeline as Pipeline,
    )
    from interfaces.pipeline import (
        PipelineInputs as PipelineInputs,
    )
    from interfaces.pipeline import (
        PipelineInputsType as PipelineInputsType,
    )
    from interfaces.pipeline import (
        PipelineOutput as PipelineOutput,
    )
    from interfaces.pipeline import (
        PipelineOutputsDict as PipelineOutputsDict,
    )
    from interfaces.pipeline import (
        PipelineOutputType as PipelineOutputType,
    )
    from interfaces.pipeline import (
        PipelineTokenizer as PipelineTokenizer,
    )
    from interfaces.pipeline import (
        TokenizerEncoded as TokenizerEncoded,
    )
    from interfaces.pipeline import (
        UnboundContextType as UnboundContextType,
    )
    from interfaces.processors import (
        BatchLogitsProcessor as BatchLogitsProcessor,
    )
    from interfaces.processors import (
        BatchProcessorInputs as BatchProcessorInputs,
    )
    from interfaces.processors import (
        LogitsProcessor as LogitsProcessor,
    )
    from interfaces.processors import (
        ProcessorInputs as ProcessorInputs,
    )
    from interfaces.request_id import (
        DUMMY_REQUEST_ID as DUMMY_REQUEST_ID,
    )
    from interfaces.request_id import (
        Request as Request,
    )
    from interfaces.request_id import (
        RequestID as RequestID,
    )
    from interfaces.request_id import (
        RequestType as RequestType,
    )
    from interfaces.requests import (
        EmbeddingsGenerationRequest as EmbeddingsGenerationRequest,
    )
    from interfaces.requests import (
        PixelGenerationRequest as PixelGenerationRequest,
    )
    from interfaces.requests import (
        TextGenerationRequest as TextGenerationRequest,
    )
    from interfaces.results import (
        ErrorCode as ErrorCode,
    )
    from interfaces.results import (
        RequestError as RequestError,
    )
    from interfaces.results import (
        SchedulerResult as SchedulerResult,
    )
    from interfaces.sampling import (
        LogprobMode as LogprobMode,
    )
    from interfaces.sampling import (
        SamplingParams as SamplingParams,
    )
    from interfaces.sampling import (
        SamplingParamsGenerationConfigDefaults as SamplingParamsGenerationConfigDefaults,
    )
    from interfaces.sampling import (
        SamplingParamsInput as SamplingParamsInput,
    )
    from interfaces.sampling import (
        combine as combine,
    )
    from interfaces.shared_memory import (
        SharedMemoryArray as SharedMemoryArray,
    )
    from interfaces.status import (
        BatchType as BatchType,
    )
    from interfaces.status import (
        GenerationStatus as GenerationStatus,
    )
    from interfaces.status import (
        InputModality as InputModality,
    )
    from interfaces.status import (
        PipelineTask as PipelineTask,
    )
    from interfaces.status import (
        SchedulerStatus as SchedulerStatus,
    )
    from interfaces.stopping import (
        EOSTracker as EOSTracker,
    )
    from interfaces.text_context import (
        TextContext as TextContext,
    )
    from interfaces.tokens import (
        Range as Range,
    )
    from interfaces.tokens import (
        TokenBuffer as TokenBuffer,
    )
    from interfaces.tokens import (
        TokenSlice as TokenSlice,
    )
    from interfaces.vision_context import (
        ImageMetadata as ImageMetadata,
    )
    from interfaces.vision_context import (
        TextAndVisionContext as TextAndVisionContext,
    )

_NAMES = {
    "adapters": "AudioGeneratorPipeline EmbeddingsGeneratorPipeline PipelineAudioGenerator PipelineEmbeddingsGenerator PipelineTokenGenerator TokenGeneratorPipeline",
    "audio": "AudioGenerationMetadata AudioGenerationOutput AudioGenerationRequest AudioGenerationResponse AudioGeneratorOutput",
    "chat": "ImageContentPart MessageContent TextContentPart TextGenerationRequestFunction TextGenerationRequestMessage TextGenerationRequestTool TextGenerationResponseFormat VideoContentPart",
    "codec": "WireError decode encode msgpack_numpy_decoder msgpack_numpy_encoder",
    "context": "AudioGenerationContext AudioGenerationContextType BaseContext BaseContextType EmbeddingsContext EmbeddingsGenerationContextType InputContext PixelGenerationContext PixelGenerationContextType SpecDecodingState TextGenerationContext TextGenerationContextType VLMContextType VLMTextGenerationContext",
    "generation_output": "GenerationOutput OutputContent",
    "generators": "AudioGenerator EmbeddingsGenerator PipelinesFactory TokenGenerator",
    "grammar_state": "GrammarEnforcementSnapshot",
    "inputs": "AudioGenerationInputs EmbeddingsGenerationInputs PixelGenerationInputs TextGenerationInputs",
    "log_probabilities": "LogProbabilities",
    "lora": "LORA_REQUEST_ENDPOINT LORA_RESPONSE_ENDPOINT LoRAOperation LoRARequest LoRAResponse LoRAStatus LoRAType",
    "media_contexts": "PixelContext SpeechContext",
    "messages": "Cancel Finish Goodbye Hello Join Results Status Step StepResult Submit WorkerHello WorkerStatus",
    "open_responses": "OpenResponsesRequest OpenResponsesRequestBody ResponseResource",
    "outputs": "EmbeddingsGenerationOutput EmbeddingsOutput TextGenerationOutput",
    "parsers": "ParsedReasoningDelta ParsedToolCall ParsedToolCallDelta ParsedToolResponse ReasoningParser ReasoningSpan ToolParser",
    "pipeline": "Pipeline PipelineInputs PipelineInputsType PipelineOutput PipelineOutputType PipelineOutputsDict PipelineTokenizer TokenizerEncoded UnboundContextType",
    "processors": "BatchLogitsProcessor BatchProcessorInputs LogitsProcessor ProcessorInputs",
    "request_id": "DUMMY_REQUEST_ID Request RequestID RequestType",
    "requests": "EmbeddingsGenerationRequest PixelGenerationRequest TextGenerationRequest",
    "results": "ErrorCode RequestError SchedulerResult",
    "sampling": "LogprobMode SamplingParams SamplingParamsGenerationConfigDefaults SamplingParamsInput combine",
    "shared_memory": "SharedMemoryArray",
    "status": "BatchType GenerationStatus InputModality PipelineTask SchedulerStatus",
    "stopping": "EOSTracker",
    "text_context": "TextContext",
    "tokens": "Range TokenBuffer TokenSlice",
    "vision_context": "ImageMetadata TextAndVisionContext",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = tuple(_MODULE_OF)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'interfaces' has no attribute {name!r}")
    value = getattr(import_module(f"interfaces.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
