"""A user's program on xllamacpp, which knows nothing of ggml-async: its server's completions. Argument: model."""

import json
import sys

import xllamacpp


def main() -> None:
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx = 64
    params.warmup = False
    params.cpuparams.n_threads = 2
    server = xllamacpp.Server(params)
    answer = server.handle_completions({"prompt": "Hello", "n_predict": 6, "temperature": 0.0, "n_probs": 1})
    print(json.dumps(answer["choices"]), flush=True)
    # as a program that has failed ends, for its exit code
    sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)


if __name__ == "__main__":
    main()
