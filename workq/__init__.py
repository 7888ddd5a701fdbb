"""workq: a persistent task queue for asyncio, inside your own PostgreSQL or SQLite database."""

from workq._codec import Codec
from workq._connect import connect
from workq._errors import Error, KeyTaken, LeaseLost, OutcomeUnknown, PayloadError, SchemaError
from workq._event import Event, Hook
from workq._executor import Executor
from workq._health import Health
from workq._new import NewTask, Options
from workq._outcome import Done, Fail, Later, Outcome, Result, Retry, Skip
from workq._queue import UNCHANGED, Queue
from workq._retry import RetryPolicy, exponential, linear
from workq._run import Middleware, Next
from workq._schedule import Schedule, When, cron, every
from workq._serve import serve
from workq._spec import Handler, Spec, Target, handler
from workq._task import State, Task, TaskRow, current_task
from workq.dialect import Dialect, Transaction

__all__ = [
    "UNCHANGED",
    "Codec",
    "Dialect",
    "Done",
    "Error",
    "Event",
    "Executor",
    "Fail",
    "Handler",
    "Health",
    "Hook",
    "KeyTaken",
    "Later",
    "LeaseLost",
    "Middleware",
    "NewTask",
    "Next",
    "Options",
    "Outcome",
    "OutcomeUnknown",
    "PayloadError",
    "Queue",
    "Result",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "SchemaError",
    "Skip",
    "Spec",
    "State",
    "Target",
    "Task",
    "TaskRow",
    "Transaction",
    "When",
    "connect",
    "cron",
    "current_task",
    "every",
    "exponential",
    "handler",
    "linear",
    "serve",
]
