#!/bin/sh
# Make the virtual environment for this platform: sh scripts/setup.sh VENV [PYTHON]. Called by `make setup`.
set -eu

venv=$1
asked=${2:-}

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [ -n "$asked" ]; then
        command -v "$asked" >/dev/null 2>&1 || fail "there is no $asked; give another one as PYTHON=..."
        new_enough "$asked" || fail "$asked is $("$asked" -V 2>&1); Python 3.11 or newer is needed (PYTHON=/path/to/it)"
        python=$asked
        return
    fi
    for python in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$python" >/dev/null 2>&1 && new_enough "$python"; then
            return
        fi
    done
    fail "Python 3.11 or newer is needed and none was found; install it, or name it as make setup PYTHON=/path/to/it"
}

pick_extras() {
    case $(uname -s) in
    Darwin)
        [ "$(uname -m)" = arm64 ] || fail "MLX needs Apple silicon; on this Mac it cannot run"
        extras=dev what="macOS (Metal)"
        ;;
    Linux)
        if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then
            extras=cuda,dev what="Linux with an NVIDIA GPU (CUDA 13)"
        else
            extras=cpu,dev what="Linux on the CPU"
        fi
        ;;
    *) fail "MLX runs on macOS and Linux; $(uname -s) is neither" ;;
    esac
}

# Tests compile the GPU kernels' text for the CPU.
pick_compiler() {
    for name in g++ clang++ c++; do
        if command -v "$name" >/dev/null 2>&1; then
            return
        fi
    done
    extras=$extras,compiler
}

make_venv() {
    if [ -x "$venv/bin/python" ] && new_enough "$venv/bin/python"; then
        say "using the virtual environment in $venv"
    else
        find_python
        "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
            fail "$python has no venv module; install it (Debian, Ubuntu: apt install python3-venv)"
        say "making a virtual environment in $venv with $("$python" -V 2>&1)"
        "$python" -m venv --clear "$venv" || fail "the virtual environment could not be made; the lines above say why"
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null ||
        fail "pip is missing in $venv; remove that folder and try again"
}

pick_extras
pick_compiler
make_venv
say "installing dspark for $what: some 500 MB with MLX, a few minutes the first time"
"$venv/bin/python" -m pip --disable-pip-version-check install --editable ".[$extras]" ||
    fail "pip could not install dspark; its last lines above say why (without a network nothing can be fetched)"
case $extras in
cpu*) "$venv/bin/python" -m dspark.blas_setup ;;
esac
say "done; $venv/bin/dspark is ready"
