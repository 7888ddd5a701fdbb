"""The errors workq raises on its own account."""


class Error(Exception):
    """Base class of workq's own errors. Errors of the database driver are passed through as they are."""

    __module__ = "workq"

    def __init_subclass__(cls) -> None:
        cls.__module__ = "workq"  # as users import it, and as stored errors name it


class KeyTaken(Error):
    """`retry` found a live task with the same key. The caller's transaction stays usable."""


class LeaseLost(Error):
    """The task no longer belongs to this run: its lease ran out and was taken over, or it was deleted."""


class PayloadError(Error, ValueError):
    """A payload cannot be stored, or what is stored does not decode to the declared type."""


class SchemaError(Error):
    """The table is missing, older than this code needs, or newer than it understands."""


class OutcomeUnknown(Error):
    """The database's reply was lost: the tasks may or may not have been stored.

    Nothing is sent twice. Enqueue again if a double is harmless, or give the task a `key`.
    """
