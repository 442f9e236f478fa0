"""Every message that crosses a process boundary.

API replica <-> scheduler: `Hello`, `Submit`, `Cancel`, `Detach`, `Goodbye`, `Order`, `SessionOrder`, `AdapterOrder`,
`WeightsOrder`, `Inquiry`, `DecisionsInquiry` one way, `Results`, `Vectors`, `Unknown`, `Status`, `OrderAnswer`,
`SessionAnswer`, `AdapterAnswer`, `WeightsAnswer`, `InquiryAnswer`, `DecisionsAnswer` the other.

Scheduler <-> worker: `Step`, `Batch`, `PixelStep`, `ShipKv`, `TakeKv`, `LoadAdapter`, `DropAdapter`, `WeightsCommand`,
`Dismissal`, `Retire`, `Ping`, `Welcome`, `Refusal` one way, `WorkerHello`, `StepResult`, `Ready`, `KvMoved`, `KvPiece`,
`KvTaken`, `BatchResult`, `PixelResult`, `AdapterLoaded`, `AdapterFailed`, `WeightsReport`, `WorkerLeaves`,
`WorkerGoodbye` the other.

A replica names its requests by a 32-bit handle and the scheduler names running sequences on a worker by a 32-bit row,
so that no string crosses either wire per token. Field order is the wire order: append only, and raise PROTOCOL_VERSION
otherwise.

Messages of each step are not frozen, because Python takes five times as long to make frozen objects. Treat them as
frozen all the same.
"""

from interfaces.messages.adapters import (
    AdapterAnswer,
    AdapterFailed,
    AdapterLoaded,
    AdapterOrder,
    AdapterState,
    AdapterStatus,
    DropAdapter,
    LoadAdapter,
)
from interfaces.messages.api import (
    LOWEST_PRIORITY,
    REGISTRATION_SIZE,
    Action,
    Cancel,
    Detach,
    Finish,
    Goodbye,
    Hello,
    Inquiry,
    InquiryAnswer,
    Order,
    OrderAnswer,
    Results,
    SchedulingOptions,
    Status,
    Submit,
    Unknown,
    Vectors,
    WorkerStatus,
)
from interfaces.messages.decisions import Decision, DecisionsAnswer, DecisionsInquiry, Stage
from interfaces.messages.kv_moves import Dismissal, KvMoved, KvPiece, KvTaken, ShipKv, TakeKv, WorkerLeaves
from interfaces.messages.pixels import KeptStep, PixelJoin, PixelPreview, PixelResult, PixelStep
from interfaces.messages.sessions import (
    SESSION_MEDIA_BYTES,
    SessionAction,
    SessionAnswer,
    SessionMedium,
    SessionOrder,
)
from interfaces.messages.weights import (
    FIRST_VERSION,
    KV_CACHE,
    WEIGHTS,
    GroupSpec,
    RunningMode,
    TensorSpec,
    WeightsAction,
    WeightsAnswer,
    WeightsCommand,
    WeightsOrder,
    WeightsReport,
    WeightsStatus,
    WeightsTask,
    WeightsVersion,
)
from interfaces.messages.worker import (
    CUT_IMAGES,
    EPOCHS_OF_A_SUPERVISOR,
    GENERATE,
    NO_IMAGES,
    UNREGISTERED,
    WHOLE_IMAGES,
    WHOLE_PROMPTS,
    Batch,
    BatchResult,
    Join,
    Ping,
    Ready,
    Refusal,
    Retire,
    RowGrammar,
    Step,
    StepResult,
    Welcome,
    WorkerGoodbye,
    WorkerHello,
)

__all__ = [
    "CUT_IMAGES",
    "EPOCHS_OF_A_SUPERVISOR",
    "FIRST_VERSION",
    "GENERATE",
    "KV_CACHE",
    "LOWEST_PRIORITY",
    "NO_IMAGES",
    "REGISTRATION_SIZE",
    "SESSION_MEDIA_BYTES",
    "UNREGISTERED",
    "WEIGHTS",
    "WHOLE_IMAGES",
    "WHOLE_PROMPTS",
    "Action",
    "AdapterAnswer",
    "AdapterFailed",
    "AdapterLoaded",
    "AdapterOrder",
    "AdapterState",
    "AdapterStatus",
    "Batch",
    "BatchResult",
    "Cancel",
    "Decision",
    "DecisionsAnswer",
    "DecisionsInquiry",
    "Detach",
    "Dismissal",
    "DropAdapter",
    "Finish",
    "Goodbye",
    "GroupSpec",
    "Hello",
    "Inquiry",
    "InquiryAnswer",
    "Join",
    "KeptStep",
    "KvMoved",
    "KvPiece",
    "KvTaken",
    "LoadAdapter",
    "Message",
    "Order",
    "OrderAnswer",
    "Ping",
    "PixelJoin",
    "PixelPreview",
    "PixelResult",
    "PixelStep",
    "Ready",
    "Refusal",
    "Results",
    "Retire",
    "RowGrammar",
    "RunningMode",
    "SchedulingOptions",
    "SessionAction",
    "SessionAnswer",
    "SessionMedium",
    "SessionOrder",
    "ShipKv",
    "Stage",
    "Status",
    "Step",
    "StepResult",
    "Submit",
    "TakeKv",
    "TensorSpec",
    "Unknown",
    "Vectors",
    "WeightsAction",
    "WeightsAnswer",
    "WeightsCommand",
    "WeightsOrder",
    "WeightsReport",
    "WeightsStatus",
    "WeightsTask",
    "WeightsVersion",
    "Welcome",
    "WorkerGoodbye",
    "WorkerHello",
    "WorkerLeaves",
    "WorkerStatus",
]

Message = (
    Hello
    | Submit
    | Cancel
    | Detach
    | Goodbye
    | Order
    | Inquiry
    | Results
    | Vectors
    | Unknown
    | Status
    | OrderAnswer
    | SessionOrder
    | SessionAnswer
    | AdapterOrder
    | AdapterAnswer
    | WeightsOrder
    | WeightsAnswer
    | InquiryAnswer
    | DecisionsInquiry
    | DecisionsAnswer
    | WorkerHello
    | Step
    | StepResult
    | Ready
    | KvMoved
    | Batch
    | BatchResult
    | LoadAdapter
    | DropAdapter
    | AdapterLoaded
    | AdapterFailed
    | WeightsCommand
    | WeightsReport
    | Retire
    | Ping
    | Welcome
    | Refusal
    | WorkerGoodbye
)
