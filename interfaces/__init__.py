"""The nouns of the system and the wire between its processes: types that cross a process, and nothing else.

A module is loaded when one of its names is first used, so that a process pays only for what it needs. None of them
pulls in torch, zmq, starlette or transformers.
"""

# ruff: noqa: F403 (type checkers see the stars; what is public is said below)

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from interfaces.base.log_probabilities import LogProbabilities as LogProbabilities
    from interfaces.base.request_id import *
    from interfaces.base.status import *
    from interfaces.context.codec_windows import ClipContext as ClipContext
    from interfaces.context.codec_windows import CodecContext as CodecContext
    from interfaces.context.codec_windows import CodecFacts as CodecFacts
    from interfaces.context.grammar_state import GrammarEnforcementSnapshot as GrammarEnforcementSnapshot
    from interfaces.context.grammar_state import GrammarState as GrammarState
    from interfaces.context.images import ImageMetadata as ImageMetadata
    from interfaces.context.media import *
    from interfaces.context.painting import PATCH_SIDE as PATCH_SIDE
    from interfaces.context.painting import PaintingContext as PaintingContext
    from interfaces.context.pooling import PoolingContext as PoolingContext
    from interfaces.context.pooling import PoolingTask as PoolingTask
    from interfaces.context.pooling import TokenMark as TokenMark
    from interfaces.context.protocols import *
    from interfaces.context.stopping import EOSTracker as EOSTracker
    from interfaces.context.synthesis import SynthesisContext as SynthesisContext
    from interfaces.context.text import TextContext as TextContext
    from interfaces.context.tokens import *
    from interfaces.context.vision import TextAndVisionContext as TextAndVisionContext
    from interfaces.messages import *
    from interfaces.messages.hidden_states import HiddenStates as HiddenStates
    from interfaces.messages.logprob_reports import LogprobReports as LogprobReports
    from interfaces.messages.token_runs import TokenRuns as TokenRuns
    from interfaces.pipelines.adapters import *
    from interfaces.pipelines.audio import *
    from interfaces.pipelines.generation_output import *
    from interfaces.pipelines.generators import *
    from interfaces.pipelines.inputs import *
    from interfaces.pipelines.open_responses import *
    from interfaces.pipelines.parsers import *
    from interfaces.pipelines.pipeline import *
    from interfaces.pipelines.pooling import PoolingModel as PoolingModel
    from interfaces.pipelines.processors import *
    from interfaces.pipelines.task import PipelineTask as PipelineTask
    from interfaces.request.chat import *
    from interfaces.request.constraint import *
    from interfaces.request.lora import *
    from interfaces.request.requests import *
    from interfaces.request.sampling import *
    from interfaces.result.outputs import *
    from interfaces.result.pooled_values import PooledValues as PooledValues
    from interfaces.result.results import *
    from interfaces.wire.codec import *
    from interfaces.wire.handover import Handover as Handover
    from interfaces.wire.shared_memory import MESSAGE_THRESHOLD as MESSAGE_THRESHOLD
    from interfaces.wire.shared_memory import Segments as Segments
    from interfaces.wire.shared_memory import Shareable as Shareable
    from interfaces.wire.shared_memory import SharedMemoryArray as SharedMemoryArray
    from interfaces.wire.shared_memory import SharedMemoryError as SharedMemoryError
    from interfaces.wire.shared_memory import fill as fill
    from interfaces.wire.shared_memory import mapped as mapped
    from interfaces.wire.shared_memory import sweep_segments as sweep_segments

_PUBLIC = """
base.log_probabilities: LogProbabilities
base.request_id: DUMMY_REQUEST_ID Request RequestID RequestType
base.status: BatchType GenerationStatus InputModality SchedulerStatus
wire.codec: VersionError WireError decode encode msgpack_numpy_decoder msgpack_numpy_encoder
wire.handover: Handover
wire.shared_memory: MESSAGE_THRESHOLD Segments Shareable SharedMemoryArray SharedMemoryError fill mapped sweep_segments
request.chat: ImageContentPart MessageContent SoundContentPart TextContentPart TextGenerationRequestFunction
    TextGenerationRequestMessage TextGenerationRequestTool TextGenerationResponseFormat VideoContentPart
request.constraint: Constraint ConstraintKind
request.lora: LORA_REQUEST_ENDPOINT LORA_RESPONSE_ENDPOINT LoRAOperation LoRARequest LoRAResponse LoRAStatus LoRAType
request.requests: EmbeddingsGenerationRequest ImageWishes PixelGenerationRequest TextGenerationRequest VideoWishes
request.sampling: LogprobMode MOST_LOGPROB_IDS MOST_TOP_LOGPROBS SEED_LIMIT SamplingParams
    SamplingParamsGenerationConfigDefaults SamplingParamsInput combine
result.outputs: EmbeddingsGenerationOutput EmbeddingsOutput TextGenerationOutput
result.pooled_values: PooledValues
result.results: ErrorCode RequestError SchedulerResult
context.codec_windows: ClipContext CodecContext CodecFacts
context.grammar_state: GrammarEnforcementSnapshot GrammarState
context.images: ImageMetadata
context.media: PixelContext SpeechContext
context.painting: PATCH_SIDE PaintingContext
context.pooling: PoolingContext PoolingTask TokenMark
context.protocols: AudioGenerationContext AudioGenerationContextType AudioGeneratorContext BaseContext BaseContextType
    EmbeddingsContext EmbeddingsGenerationContextType EmbeddingsGeneratorContext InputContext PixelGenerationContext
    PixelGenerationContextType SpecDecodingState TextGenerationContext TextGenerationContextType VLMContextType
    VLMTextGenerationContext
context.stopping: EOSTracker
context.synthesis: SynthesisContext
context.text: TextContext
context.tokens: Range TokenBuffer TokenSlice
context.vision: TextAndVisionContext
messages: Action AdapterAnswer AdapterFailed AdapterLoaded AdapterOrder AdapterState AdapterStatus Batch BatchResult
    CUT_IMAGES Cancel Decision DecisionsAnswer DecisionsInquiry Detach Dismissal DropAdapter EPOCHS_OF_A_SUPERVISOR
    FIRST_VERSION Finish GENERATE Goodbye GroupSpec Hello Inquiry InquiryAnswer Join KV_CACHE KeptStep KvMoved KvPiece
    KvTaken LOWEST_PRIORITY LoadAdapter NO_IMAGES Order OrderAnswer Ping PixelJoin PixelPreview PixelResult
    PixelStep REGISTRATION_SIZE Ready Refusal Results Retire RowGrammar RunningMode SESSION_MEDIA_BYTES
    SchedulingOptions SessionAction SessionAnswer SessionMedium SessionOrder ShipKv Stage Status Step StepResult
    Submit TakeKv TensorSpec UNREGISTERED Unknown Vectors WEIGHTS WHOLE_IMAGES WHOLE_PROMPTS WeightsAction
    WeightsAnswer WeightsCommand WeightsOrder WeightsReport WeightsStatus WeightsTask WeightsVersion Welcome
    WorkerGoodbye WorkerHello WorkerLeaves WorkerStatus
messages.hidden_states: HiddenStates
messages.logprob_reports: LogprobReports
messages.token_runs: TokenRuns
pipelines.adapters: AudioGeneratorPipeline EmbeddingsGeneratorPipeline PipelineAudioGenerator
    PipelineEmbeddingsGenerator PipelineTokenGenerator TokenGeneratorPipeline
pipelines.audio: AudioGenerationMetadata AudioGenerationOutput AudioGenerationRequest AudioGenerationResponse
    AudioGeneratorOutput
pipelines.generation_output: GenerationOutput OutputContent OutputImageContent TokenDetails Usage
pipelines.generators: AudioGenerator EmbeddingsGenerator PipelinesFactory TokenGenerator
pipelines.inputs: AudioGenerationInputs EmbeddingsGenerationInputs PixelGenerationInputs TextGenerationInputs
pipelines.open_responses: OpenResponsesRequest OpenResponsesRequestBody ResponseResource
pipelines.parsers: ParsedReasoningDelta ParsedToolCall ParsedToolCallDelta ParsedToolResponse ReasoningParser
    ReasoningSpan ToolParser
pipelines.pipeline: Pipeline PipelineInputs PipelineInputsType PipelineOutput PipelineOutputType PipelineOutputsDict
    PipelineTokenizer TokenizerEncoded UnboundContextType
pipelines.pooling: PoolingModel
pipelines.processors: BatchLogitsProcessor BatchProcessorInputs LogitsProcessor ProcessorInputs
pipelines.task: PipelineTask
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
