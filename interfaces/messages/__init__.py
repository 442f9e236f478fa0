"""Every message that crosses a process boundary.

API replica <-> scheduler: `Hello`, `Submit`, `Cancel`, `Detach`, `Goodbye`, `Order`, `SessionOrder`, `Inquiry` one way,
`Results`, `Vectors`, `Unknown`, `Status`, `OrderAnswer`, `SessionAnswer`, `InquiryAnswer` the other.

Scheduler <-> worker: `Step`, `Batch`, `Retire` one way, `WorkerHello`, `StepResult`, `Ready`, `BatchResult`,
`WorkerGoodbye` the other.

A replica names its requests by a 32-bit handle and the scheduler names running sequences on a worker by a 32-bit row,
so that no string crosses either wire per token. Field order is the wire order: append only, and raise PROTOCOL_VERSION
otherwise.

Messages of each step are not frozen, because Python takes five times as long to make frozen objects. Treat them as
frozen all the same.
"""

from interfaces.messages.api import (
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
    SessionAction,
    SessionAnswer,
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
    "WHOLE_IMAGES",
    "WHOLE_PROMPTS",
    "Action",
    "Batch",
    "BatchResult",
    "Cancel",
    "Detach",
    "Finish",
    "Goodbye",
    "Hello",
    "Inquiry",
    "InquiryAnswer",
    "Join",
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
    | InquiryAnswer
    | WorkerHello
    | Step
    | StepResult
    | Ready
    | Batch
    | BatchResult
    | Retire
    | WorkerGoodbye
)
