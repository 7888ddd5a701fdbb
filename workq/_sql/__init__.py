"""Every statement workq sends, whole and constant: the same list in PostgreSQL's words and in SQLite's."""

from workq._sql._postgres import postgres
from workq._sql._sqlite import sqlite
from workq._sql._statement import Statement, Statements

__all__ = ["Statement", "Statements", "postgres", "sqlite"]
