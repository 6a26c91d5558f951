"""cyllama-vulkan: ggml 0.12 (API 2) with Vulkan, so real readbacks in another ggml. Argument: model.

It offers no tensor overrides; with the KV cache in CPU memory (offload_kqv off) attention is on the CPU in every layer.
"""

import logging
import sys

import cyllama.llama.llama_cpp as cy
import numpy as np
import workload
from report import emit

from ggml_async import native


class Model(cy.LlamaModel):
    """get_logits asks its model for this, which the released binding does not have."""

    n_vocab = workload.SHAPE["n_vocab"]


def decode(ctx: object, pos: int, token: int) -> bytes:
    batch = cy.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1)
    batch.add(token, pos, [0], True)
    ctx.decode(batch)  # type: ignore[attr-defined]
    ctx.synchronize()  # type: ignore[attr-defined]
    return np.asarray(ctx.get_logits(), np.float32).tobytes()  # type: ignore[attr-defined]


def run(model: object, offload_kqv: bool) -> list[bytes]:
    params = cy.LlamaContextParams()
    params.n_ctx = 64
    params.n_threads = params.n_threads_batch = 2
    params.offload_kqv = offload_kqv
    ctx = cy.LlamaContext(model, params, verbose=False)
    rows = [decode(ctx, pos, token) for pos, token in enumerate((5, 9, 33, 7))]
    ctx.close()
    return rows


def main() -> None:
    cy.disable_logging()
    cy.ggml_backend_load_all()
    cy.llama_backend_init()
    params = cy.LlamaModelParams()
    params.n_gpu_layers = 99
    model = Model(sys.argv[1], params, verbose=False)
    bare = run(model, False)
    host = native.attach()
    arms = {}
    with native.Recorder() as recorder:
        for mode in ("stock", "async", "off"):
            host.mode = mode
            host.reset_counters()
            recorder.read()
            rows = run(model, False)
            records = recorder.read()
            readbacks = records[records["kind"] == native.record_kind("readback")]
            stages = records[records["kind"] == native.record_kind("stage")]
            arms[mode] = {
                "digest": workload.digest(rows), "counters": host.counters(), "declined": host.declined(),
                "stages": [[int(s["n_readbacks"]), int(s["n_sync"]), int(s["bytes"])] for s in stages],
                "names": sorted({name.decode() for name in readbacks["name"]}),
                "distinct": len(set(rows)),
            }  # fmt: skip
    host.mode = "async"
    host.reset_counters()
    run(model, True)
    on_gpu = host.counters()
    detached = host.detach()
    after = workload.digest(run(model, False))
    logging.info("done")
    emit(info=vars(host.info()), bare=workload.digest(bare), arms=arms, on_gpu=on_gpu, detached=detached, after=after)


if __name__ == "__main__":
    main()
