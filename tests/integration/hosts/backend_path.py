"""llama.cpp loads the plug-in itself, from GGML_BACKEND_PATH. Arguments: runtime folder, model."""

import sys
from pathlib import Path

import workload
from report import Ggml, emit

from ggml_async import llama, native


def main() -> None:
    library = llama.load_library(Path(sys.argv[1]))
    with (
        library.load_model(Path(sys.argv[2]), overrides=workload.overrides(workload.LAYERS)) as model,
        model.context(n_ctx=128, n_threads=2) as context,
    ):
        digest = workload.digest(workload.run(context))
    registries = Ggml(str(library.ggml_library)).registries()
    # The same file again is the same library: its host is the one that llama.cpp's loader made.
    n_hosts = native.native().lib.ggml_async_host_count()
    host = native.Host(0) if n_hosts else None
    emit(
        registries=registries, n_hosts=n_hosts, digest=digest, counters=host.counters() if host else {},
        info=vars(host.info()) if host else {},
    )  # fmt: skip


if __name__ == "__main__":
    main()
