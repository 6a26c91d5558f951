"""A model on mock devices, in llama.cpp, which loads the mock device itself (GGML_BACKEND_PATH).

Arguments: runtime folder, model. Prints the digest of the logits on the CPU alone, and per mode with its counters.
"""

import json
import sys
from pathlib import Path

from integration import workload

from ggml_async import llama, native

#: The batch of 32 in four.
UBATCH = 8


def main() -> None:
    library = llama.load_library(Path(sys.argv[1]))
    host = native.attach(library.ggml_library)
    mocks = [device for device in library.devices() if device.name.startswith("MOCK")]
    found = {"devices": [device.name for device in mocks], "digests": {}, "counters": {}}

    def run(name, devices, n_cpu_moe, n_ubatch=512):
        before = host.counters()
        with (
            library.load_model(Path(sys.argv[2]), devices=devices, overrides=workload.overrides(n_cpu_moe)) as model,
            model.context(n_ctx=128, n_ubatch=n_ubatch, n_threads=1) as context,
        ):
            found["digests"][name] = workload.digest(workload.run(context))
        found["counters"][name] = {key: value - before[key] for key, value in host.counters().items()}

    run("cpu", [], 0)
    run("cpu, ubatches", [], 0, UBATCH)
    for mode in ("stock", "async"):
        host.mode = mode
        run(mode, mocks, workload.LAYERS)
        run(f"{mode}, half", mocks, workload.LAYERS // 2)
        # without a tensor placed by hand llama.cpp copies inputs ahead for the next ubatch (pipeline parallelism)
        run(f"{mode}, ubatches, pipeline", mocks, 0, UBATCH)
        run(f"{mode}, ubatches", mocks, workload.LAYERS, UBATCH)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
