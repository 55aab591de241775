# shellcheck shell=bash
# Sourced by the scripts: finds a Python that is new enough, or says in one line what to install.

# Sets PYTHON to the first interpreter of version 3.11 or later. $1: the script, for the message.
find_python() {
    local candidate found="there is no python3"
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$candidate
            return 0
        fi
        found="$candidate is older"
    done
    if [ "$(uname -s 2>/dev/null || true)" = Darwin ]; then
        echo "$1: Python 3.11 or later is needed and $found: install one, for example with" \
            "brew install python@3.13" >&2
    else
        echo "$1: Python 3.11 or later is needed and $found: apt install python3 python3-venv" \
            "(Debian 12 or later has a new enough one)" >&2
    fi
    return 1
}
