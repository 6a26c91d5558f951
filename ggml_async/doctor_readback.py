"""Child of ``doctor``: a tiny MoE with its experts on the CPU, stock and async, and one line of JSON about it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from . import layer, models, native
from .errors import GgmlAsyncError
from .llama import LlamaLibrary
from .profile_plan import cpu_moe_overrides

#: Tokens decoded per arm.
N_TOKENS = 2


def main(llama_dir: Path, folder: Path) -> None:
    """Decode with both arms; prints counts and whether the logits were bitwise equal.

    Args:
        llama_dir: folder of the llama.cpp libraries.
        folder: an existing folder for the model; the caller removes it.
    """
    path = folder / "tiny.gguf"
    models.make_synthetic(path, **models.PRESETS["tiny"])
    library = LlamaLibrary(llama_dir)
    host = native.attach(library.ggml_library)
    library.devices()  # the Vulkan layer is there once they are listed
    counters = layer.LayerCounters.find()
    watched: dict[str, layer.LayerSnapshot] = {}
    seen: dict[str, dict[str, int]] = {}
    logits: dict[str, list[bytes]] = {}
    overrides = cpu_moe_overrides(models.PRESETS["tiny"]["n_layer"])
    with library.load_model(path, overrides=overrides) as model, model.context(n_ctx=64, n_threads=1) as context:
        for arm in ("stock", "async"):
            host.mode = arm
            context.clear_memory()
            host.reset_counters()
            logits[arm] = []
            before = counters.snapshot() if counters else None
            for token in range(1, N_TOKENS + 1):
                context.decode([token])
                context.synchronize()
                logits[arm].append(context.logits().tobytes())
            seen[arm] = host.counters()
            if counters and before:
                watched[arm] = counters.snapshot() - before
    print(
        json.dumps(
            {
                "readbacks": seen["async"]["readbacks"],
                "stages": seen["async"]["stages"],
                "stock_synchronizes": seen["stock"]["synchronizes"],
                "async_synchronizes": seen["async"]["synchronizes"],
                "declined": {
                    k.removeprefix("declined_"): v for k, v in seen["async"].items() if k.startswith("declined_") and v
                },
                "identical": logits["stock"] == logits["async"],
                "layer": _layer(counters, watched) if counters else None,
            }
        )
    )


def _layer(counters: layer.LayerCounters, watched: dict[str, layer.LayerSnapshot]) -> dict[str, Any]:
    return {
        "path": str(counters.path()),
        "abi": layer.ABI_VERSION,
        "devices": counters.devices(),
        **{
            arm: {name: counts.totals[name] for name in ("fence_waits", "queue_submits")}
            for arm, counts in watched.items()
        },
    }


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
    except GgmlAsyncError as error:
        sys.exit(" ".join(error.message.split()))  # the parent shows the last line of stderr
