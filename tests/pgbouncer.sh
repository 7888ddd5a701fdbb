#!/bin/sh
# The conformance tests through pgbouncer in transaction mode, each PostgreSQL behind one of its own.
# Needs pgbouncer (Debian: apt-get install pgbouncer) and the environment that has workq[dev].
#
#   tests/pgbouncer.sh [arguments for pytest]       PYTHON= names the interpreter
#
# Left out are tests of what belongs to a session, which a pooler in transaction mode does not keep: other roles, and
# other search paths.

set -eu
cd "$(dirname "$0")/.."
export WORKQ_TEST_POOLER=pgbouncer
exec "${PYTHON:-python3}" -m pytest tests/conformance \
    -k "(machine or wheel) and not sqlite and not a_role_ and not search_path" "$@"
