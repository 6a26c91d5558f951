"""A llama.cpp that finds no device but the CPU: bare, then with the plug-in attached, in every mode."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workload import digest, overrides, run

from ggml_async import native
from ggml_async.llama import LlamaLibrary, Model


def decode(model: Model) -> str:
    with model.context(n_ctx=128, n_threads=1) as context:
        return digest(run(context))


def main(llama_dir: str, model_path: str) -> None:
    library = LlamaLibrary(Path(llama_dir))
    found = {"devices": [device.type for device in library.devices()]}
    with library.load_model(model_path, overrides=overrides(4)) as model:
        results = {"bare": decode(model)}
        host = native.attach(library.ggml_library)
        counted = {}
        for mode in ("async", "stock", "off"):
            host.mode = mode
            host.reset_counters()
            results[mode] = decode(model)
            counted[mode] = host.counters()
        host.detach()
        results["detached"] = decode(model)
    print(json.dumps({**found, "results": results, "counted": counted}))


if __name__ == "__main__":
    main(*sys.argv[1:])
