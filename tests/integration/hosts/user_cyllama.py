"""A user's program on cyllama-vulkan, which knows nothing of ggml-async. Arguments: model, tokens to generate.

cyllama has no tensor overrides; with the KV cache in CPU memory attention is on the CPU in every layer.
"""

import json
import sys

import cyllama.llama.llama_cpp as cy


class Model(cy.LlamaModel):
    """get_logits asks its model for this, which the released binding does not have."""

    @property
    def n_vocab(self) -> int:
        return int(self.get_vocab().n_vocab)


def decode(ctx: cy.LlamaContext, pos: int, token: int) -> list[float]:
    batch = cy.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1)
    batch.add(token, pos, [0], True)
    ctx.decode(batch)
    return list(ctx.get_logits())


def main() -> None:
    cy.disable_logging()
    cy.ggml_backend_load_all()
    cy.llama_backend_init()
    params = cy.LlamaModelParams()
    params.n_gpu_layers = 99
    model = Model(sys.argv[1], params, verbose=False)
    settings = cy.LlamaContextParams()
    settings.n_ctx = 64
    settings.n_threads = settings.n_threads_batch = 2
    settings.offload_kqv = False
    ctx = cy.LlamaContext(model, settings, verbose=False)
    tokens, logits = [5], []
    for pos in range(int(sys.argv[2])):
        logits = decode(ctx, pos, tokens[-1])
        tokens.append(max(range(len(logits)), key=logits.__getitem__))
    ctx.close()
    print(json.dumps({"tokens": tokens, "logits": logits}), flush=True)


if __name__ == "__main__":
    main()
