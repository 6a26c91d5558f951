"""Decodes that each rebuild the graph, in a process of their own.

Arguments: runtime folder, model, mode. Prints the digest of the last logits and the readbacks.
"""

import sys
from pathlib import Path

from ggml_async import llama, native
from integration import workload
from integration.test_cases_graphs import decode_all, new_context, rebuilding_batches


def main() -> None:
    """Runs one arm; stock waits after each decode, async never."""
    folder, path, mode = sys.argv[1:]
    library = llama.load_library(Path(folder))
    host = native.attach(library.ggml_library)
    host.mode = mode
    with (
        library.load_model(Path(path), overrides=workload.overrides(workload.LAYERS)) as model,
        new_context(model, n_ctx=256, n_batch=8) as context,
    ):
        logits = decode_all(context, rebuilding_batches(), wait=mode == "stock")
    print(workload.digest([logits]), host.counters()["readbacks"])


if __name__ == "__main__":
    main()
