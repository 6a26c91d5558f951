"""xllamacpp: ggml 0.26 of API 3, compiled into one library. Runs a tiny model in its server. Argument: model."""

import logging
import sys

import xllamacpp
from report import Ggml, emit

from ggml_async import native


def main() -> None:
    host = native.attach()
    info = vars(host.info())
    ggml = Ggml(str(info["library"]))
    with ggml.cpu() as backend:
        sums = [ggml.add(backend)]
    logging.info("starting the server")
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx = 64
    params.n_predict = 4
    params.warmup = False
    params.cpuparams.n_threads = 2
    answers = []
    server = xllamacpp.Server(params)
    for mode in ("stock", "async", "off"):
        host.mode = mode
        answers.append(
            server.handle_completions({"prompt": [1, 2, 3], "n_predict": 4, "temperature": 0.0, "n_probs": 1})
        )
    computed = host.counters()
    detached = host.detach()
    answers.append(server.handle_completions({"prompt": [1, 2, 3], "n_predict": 4, "temperature": 0.0, "n_probs": 1}))
    del server
    with ggml.cpu() as backend:
        sums.append(ggml.add(backend))
    emit(info=info, sums=sums, answers=answers, counters=computed, detached=detached)


if __name__ == "__main__":
    main()
