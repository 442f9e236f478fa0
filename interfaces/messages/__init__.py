"""Every message that crosses a process boundary.

API replica <-> scheduler: `Hello`, `Submit`, `Cancel`, `Detach`, `Goodbye`, `Order`, `SessionOrder`, `AdapterOrder`,
`Inquiry` one way, `Results`, `Vectors`, `Unknown`, `Status`, `OrderAnswer`, `SessionAnswer`, `AdapterAnswer`,
`InquiryAnswer` the other.

Scheduler <-> worker: `Step`, `Batch`, `LoadAdapter`, `DropAdapter`, `Retire` one way, `WorkerHello`, `StepResult`,
`Ready`, `BatchResult`, `AdapterLoaded`, `AdapterFailed`, `WorkerGoodbye` the other.

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
    REGISTRATION_SIZE,
    SESSION_MEDIA_BYTES,
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
    SessionAction,
    SessionAnswer,
    SessionMedium,
    SessionOrder,
    Status,
    Submit,
    Unknown,
    Vectors,
    WorkerStatus,
)
from interfaces.messages.worker import (
    CUT_IMAGES,
    EPOCHS_OF_A_SUPERVISOR,
    GENERATE,
    NO_IMAGES,
    WHOLE_IMAGES,
    WHOLE_PROMPTS,
    Batch,
    BatchResult,
    Join,
    Ready,
    Retire,
    RowGrammar,
    Step,
    StepResult,
    WorkerGoodbye,
    WorkerHello,
)

__all__ = [
    "CUT_IMAGES",
    "EPOCHS_OF_A_SUPERVISOR",
    "GENERATE",
    "NO_IMAGES",
    "REGISTRATION_SIZE",
    "SESSION_MEDIA_BYTES",
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
    "Detach",
    "DropAdapter",
    "Finish",
    "Goodbye",
    "Hello",
    "Inquiry",
    "InquiryAnswer",
    "Join",
    "LoadAdapter",
    "Message",
    "Order",
    "OrderAnswer",
    "Ready",
    "Results",
    "Retire",
    "RowGrammar",
    "SchedulingOptions",
    "SessionAction",
    "SessionAnswer",
    "SessionMedium",
    "SessionOrder",
    "Status",
    "Step",
    "StepResult",
    "Submit",
    "Unknown",
    "Vectors",
    "WorkerGoodbye",
    "WorkerHello",
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
    | InquiryAnswer
    | WorkerHello
    | Step
    | StepResult
    | Ready
    | Batch
    | BatchResult
    | LoadAdapter
    | DropAdapter
    | AdapterLoaded
    | AdapterFailed
    | Retire
    | WorkerGoodbye
)
