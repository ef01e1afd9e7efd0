"""bide: register something to happen at time T; fire it now, move or cancel it until then.

from bide import Bide, Task

app = Bide("sqlite:///shop.db")

@app.handler("order.close")
async def close(task: Task[dict]): ...

async with app:
    await close.schedule({"number": 42}, key="42", delay="15m")
"""

from bide._version import __version__
from bide.app import Bide, Handler
from bide.core.answers import Answer
from bide.core.errors import (
    BadInput,
    BadPayload,
    BideError,
    DuplicateHandler,
    LeaseLost,
    MissingExtra,
    NotOpen,
    OutcomeUnknown,
    PartlyFailed,
    SetupError,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMismatch,
    StoreUnavailable,
)
from bide.core.events import Event, EventKind
from bide.core.outcomes import Dead, Defer, Done, Outcome, Retry
from bide.core.records import NewTask, OnConflict, Ref, Result, State
from bide.core.recurrence.rules import At, Cron, Every, RRule
from bide.core.retry import Exponential, Fixed, Ladder
from bide.core.table_source import Sql, TableSource
from bide.core.tasks import Task
from bide.engine.delivery.watch import DeadRow, Row, Watch
from bide.engine.delivery.worker import Worker
from bide.ports import ScaledClock, SystemClock
from bide.settings import Settings

__all__ = [
    "Answer", "At", "BadInput", "BadPayload", "Bide", "BideError", "Cron", "Dead", "DeadRow", "Defer", "Done",
    "DuplicateHandler", "Event", "EventKind", "Every", "Exponential", "Fixed", "Handler", "Ladder", "LeaseLost",
    "MissingExtra", "NewTask", "NotOpen", "OnConflict", "Outcome", "OutcomeUnknown", "PartlyFailed", "RRule", "Ref",
    "Result", "Retry", "Row", "ScaledClock", "Settings", "SetupError", "Sql", "State", "StoreCorrupt", "StoreError",
    "StoreFull", "StoreMismatch", "StoreUnavailable", "SystemClock", "TableSource", "Task", "Watch", "Worker",
    "__version__",
]  # fmt: skip
