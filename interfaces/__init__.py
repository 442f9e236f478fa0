"""The nouns of the system and the wire between its processes: types that cross a process, and nothing else.

Light on purpose: importing it pulls in numpy and msgpack, never torch, zmq, starlette or transformers.
"""

from interfaces.codec import WireError, decode, encode
from interfaces.messages import (
    Cancel,
    Finish,
    Goodbye,
    Hello,
    Join,
    Results,
    Status,
    Step,
    StepResult,
    Submit,
    WorkerHello,
    WorkerStatus,
)
from interfaces.results import ErrorCode, GenerationStatus, RequestError, SchedulerResult
from interfaces.sampling import (
    LogprobMode,
    SamplingParams,
    SamplingParamsGenerationConfigDefaults,
    SamplingParamsInput,
    combine,
)

__all__ = [
    "Cancel",
    "ErrorCode",
    "Finish",
    "GenerationStatus",
    "Goodbye",
    "Hello",
    "Join",
    "LogprobMode",
    "RequestError",
    "Results",
    "SamplingParams",
    "SamplingParamsGenerationConfigDefaults",
    "SamplingParamsInput",
    "SchedulerResult",
    "Status",
    "Step",
    "StepResult",
    "Submit",
    "WireError",
    "WorkerHello",
    "WorkerStatus",
    "combine",
    "decode",
    "encode",
]
