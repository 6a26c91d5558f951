"""llama-cpp-py-sync: ggml 0.27 of API 3, CPU only."""

import importlib.util
from pathlib import Path

from report import Ggml, emit

from ggml_async import native


def main() -> None:
    spec = importlib.util.find_spec("llama_cpp_py_sync")
    assert spec and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    library = next(path for name in ("libggml.so*", "libllama.so*") for path in sorted(folder.rglob(name)))
    ggml = Ggml(str(library))
    host = native.attach()
    with ggml.cpu() as backend:
        sums = [ggml.add(backend)]
        counters = host.counters()
        detached = host.detach()
        sums.append(ggml.add(backend))
    emit(info=vars(host.info()), sums=sums, counters=counters, detached=detached)


if __name__ == "__main__":
    main()
