"""libggml-python: a CPU-only ggml of API 2. Nothing to read back: the plug-in must be inert and leave no trace."""

import ctypes
import importlib.util
from pathlib import Path

from report import Ggml, emit

from ggml_async import native
from ggml_async.errors import GgmlAsyncError


def libraries(mode: int = ctypes.DEFAULT_MODE) -> Path:
    """Loads it as its own package does; the path of the library that holds the registry."""
    spec = importlib.util.find_spec("libggml")
    assert spec and spec.submodule_search_locations
    folder = next(path.parent for path in Path(spec.submodule_search_locations[0]).rglob("libggml.so*"))
    for name in ("libggml-base.so.0", "libggml-cpu.so.0", "libggml.so.0"):
        ctypes.CDLL(str(folder / name), mode=mode)
    return folder / "libggml.so.0"


def main() -> None:
    try:
        native.attach()
        refusal = ""
    except GgmlAsyncError as error:
        refusal = error.message
    ggml = Ggml(str(libraries()))
    sums = []
    with ggml.cpu() as before:
        host = native.attach()
        sums.append(ggml.add(before))
        with ggml.cpu() as backend:
            sums.append(ggml.add(backend))
            counters = host.counters()
            live = host.info().n_backends
            detached = host.detach()
            sums.append(ggml.add(backend))
        sums.append(ggml.add(before))
    with ggml.cpu() as after:
        sums.append(ggml.add(after))
    emit(
        refusal=refusal, sums=sums, counters=counters, live=live, detached=detached, after=host.counters(),
        info=vars(host.info()), found=native.find(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
