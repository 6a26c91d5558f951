"""Two ggml builds in one process, one with global symbols: each is its own host. Arguments: runtime folder, model."""

import ctypes
import sys
from pathlib import Path

import workload
from libggml_python import libraries
from report import Ggml, emit

from ggml_async import llama, native
from ggml_async.errors import GgmlAsyncError


def main() -> None:
    directory, model = Path(sys.argv[1]), Path(sys.argv[2])
    library = llama.load_library(directory)
    other = Ggml(str(libraries(ctypes.RTLD_GLOBAL)))
    try:
        native.attach()
        refusal = ""
    except GgmlAsyncError as error:
        refusal = str(error)
    # ggml's own door: the host is whoever calls, not whom the global scope names
    plugin = str(native.library_path()).encode()
    assert other.lib.ggml_backend_load(plugin) != other.ffi.NULL
    first = Ggml(str(library.ggml_library))
    assert first.lib.ggml_backend_load(plugin) != first.ffi.NULL
    infos = {name: native.attach(path) for name, path in zip(("runtime", "python"), native.find(), strict=True)}
    ours, theirs = infos["runtime"], infos["python"]
    with (
        library.load_model(model, overrides=workload.overrides(workload.LAYERS)) as loaded,
        loaded.context(n_ctx=128, n_threads=2) as context,
    ):
        rows = workload.run(context)
    with other.cpu() as backend:
        right = other.add(backend)
    theirs.mode = "off"
    emit(
        refusal=refusal, digest=workload.digest(rows), right=right,
        runtime={"counters": ours.counters(), **vars(ours.info())},
        python={"counters": theirs.counters(), **vars(theirs.info())},
        registries=[first.registries(), other.registries()],
    )  # fmt: skip


if __name__ == "__main__":
    main()
