"""A user's program on llama-cpp-python, which knows nothing of ggml-async. Arguments: model, exit code."""

import json
import sys

import llama_cpp


def main() -> None:
    threads = {"n_threads": 2, "n_threads_batch": 2}
    llm = llama_cpp.Llama(sys.argv[1], n_ctx=128, logits_all=True, seed=1, verbose=False, **threads)
    answer = llm.create_completion("Hello", max_tokens=6, temperature=0.0, logprobs=3)
    print(json.dumps(answer["choices"], default=float), flush=True)
    sys.exit(int(sys.argv[2]))


if __name__ == "__main__":
    main()
