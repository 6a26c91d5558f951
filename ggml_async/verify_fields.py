"""The one field table of ``ggml-async/verify/1``: JSON path, flat column, type, unit and meaning of every figure.

As ``fields.py`` has it for profile: columns that llama-bench has too carry its names, ours begin with ``ga_``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ggml_async.fields import Field, Type
from ggml_async.verify_result import ARMS, QUEUED

Json = Mapping[str, Any]


def _devices(_document: Json, test: Json) -> str:
    return "/".join(test["config"]["devices"]) or "none"


def _overrides(_document: Json, test: Json) -> str:
    return ";".join(test["config"]["overrides"]) or "none"


def where(test: Json) -> str | None:
    """The first difference of a configuration in words; None without one."""
    found = test["difference"]
    if found is None:
        return None
    parts = [f"chunk {found['chunk']}" if found["chunk"] is not None else f"prompt {found['prompt']}"]
    parts.append(f"position {found['position']}")
    parts += [f"layer {found['layer']}"] if found["layer"] is not None else []
    parts += [found["tensor"]] if found["tensor"] else []
    return ", ".join(parts)


def _config(  # noqa: PLR0917 -- as Field has them
    key: str, name: str, kind: Type, unit: str, doc: str, heading: str, width: int
) -> Field:
    return Field(f"tests.config.{key}", name, kind, unit, doc, heading, width)


_ABOUT = (
    Field("schema", "ga_schema", "str", "", "name and version of the JSON document"),
    Field("time", "", "str", "RFC 3339", "when the run began, UTC"),
    Field("build.ggml_async", "ga_version", "str", "", "version of ggml-async"),
    Field("command", "", "list", "", "the command line"),
    Field("interrupted", "", "bool", "", "whether the run was cut short: what was finished is there"),
    Field("warnings", "", "list", "", "code, message, hint and configuration of every warning"),
    Field("perplexity_spread", "", "float", "ratio", "highest over lowest stock perplexity of the "
          "configurations of one -c"),
    Field("host.llama", "build_commit", "str", "", "llama.cpp's version, as its library gives it"),
    Field("host.ggml", "ga_ggml", "str", "", "ggml's version"),
    Field("host.api_version", "ga_ggml_api", "int", "", "ggml's backend API version"),
    Field("host.dir", "", "str", "", "the folder llama.cpp was loaded from"),
    Field("host.layout", "", "str", "", "the structure layout that the plug-in proved"),
    Field("host.vulkan_layer", "", "str", "", "always null: verify times nothing"),
    Field("devices", "", "list", "", "name, description, type and async of every device"),
    Field("model.path", "model_filename", "str", "", "the model file"),
    Field("model.desc", "model_type", "str", "", "llama.cpp's description of the model"),
    Field("model.size_bytes", "model_size", "int", "bytes", "size of the model file, all parts"),
    Field("model.n_params", "model_n_params", "int", "count", "elements of all its tensors"),
    Field("model.arch", "ga_model_arch", "str", "", "the model's architecture, as its file names it"),
    Field("model.n_layer", "ga_n_layer", "int", "count", "layers of the model"),
    Field("model.n_expert", "ga_n_expert", "int", "count", "experts a layer"),
    Field("model.n_expert_used", "ga_n_expert_used", "int", "count", "experts used for a token"),
    Field("text.name", "ga_text", "str", "", "what was decoded: a file, the shipped text, or random tokens"),
    Field("text.bytes", "ga_text_bytes", "int", "bytes", "size of the text"),
    Field("text.tokens", "ga_text_tokens", "int", "tokens", "the text in the model's tokens"),
    Field("dense", "ga_dense", "str", "", "the dense model that the reference perplexity is of"),
)  # fmt: skip

_SETTINGS = (
    Field("", "devices", "str", "", "devices in use (-dev)", "device", -8, make=_devices),
    _config("n_cpu_moe", "n_cpu_moe", "int", "count", "first layers with experts on the CPU (-ncmoe)", "ncmoe", 5),
    _config("n_gpu_layers", "n_gpu_layers", "int", "count", "layers on the GPU (-ngl); -1 is all", "ngl", 3),
    _config("n_ctx", "ga_n_ctx", "int", "tokens", "tokens of a chunk (-c)", "n_ctx", 5),
    _config("n_batch", "n_batch", "int", "tokens", "most tokens of one decode (-b)", "n_batch", 7),
    _config("n_ubatch", "n_ubatch", "int", "tokens", "most tokens computed at once (-ub)", "n_ubatch", 8),
    _config("n_seq", "ga_n_seq", "int", "count", "chunks in one decode, each a sequence of its own", "", 0),
    _config("threads", "n_threads", "int", "count", "CPU threads (-t)", "threads", 7),
    _config("flash_attn", "flash_attn", "str", "", "flash attention (-fa): auto, on or off", "fa", 4),
    _config("no_op_offload", "no_op_offload", "bool", "", "whether large batches may not compute CPU weights "
          "on the GPU "
            "(-nopo)", "nopo", 4),
    Field("", "tensor_buft_overrides", "str", "", "the user's tensor placements (-ot)", "ot", -10, make=_overrides),
)  # fmt: skip


def _perplexity(arm: str) -> list[Field]:
    return [
        Field(f"tests.perplexity.{arm}.value", f"ga_{arm}_perplexity", "float", "", f"{arm}: perplexity of all chunks"),
        Field(f"tests.perplexity.{arm}.error", f"ga_{arm}_perplexity_error", "float", "", f"{arm}: its standard error"),
        Field(
            f"tests.perplexity.{arm}.scored", f"ga_{arm}_scored", "int", "count", f"{arm}: predictions it is made of"
        ),
    ]


_RESULT = (
    Field("tests.time", "test_time", "str", "RFC 3339", "when the configuration began, UTC"),
    Field("tests.identical", "ga_identical", "bool", "", "whether all logits of both arms are bitwise equal"),
    Field("tests.positions", "ga_positions", "int", "count", "rows of logits compared, of chunks and prompts"),
    Field("tests.positions_different", "ga_positions_different", "int", "count", "rows that are not bitwise equal"),
    Field("tests.finite", "ga_finite", "bool", "", "whether all logits are finite"),
    Field("tests.readbacks", "ga_readbacks", "int", "count", "asynchronous readbacks of the async arm: what is proved"),
    *(
        Field(f"tests.readbacks_by_path.{path}", f"ga_readbacks_{path}", "int", "count", f"of these: {doc}")
        for path, doc in zip(QUEUED, ("into the destination", "by a bounce buffer", "of zero bytes"), strict=True)
    ),
    Field("tests.readbacks_stock", "ga_readbacks_stock", "int", "count", "readbacks of the stock arm"),
    Field("tests.declined", "ga_declined", "object", "count", "async readbacks left to ggml's own path, by reason"),
    Field("tests.chunks", "ga_chunks", "int", "count", "chunks decoded in both arms"),
    Field("tests.chunks_asked", "ga_chunks_asked", "int", "count", "chunks asked for and there (--chunks)"),
    *(f for arm in ARMS for f in _perplexity(arm)),
    Field("tests.by_chunk", "ga_by_chunk", "list", "", "of every chunk: its perplexity in both arms with its "
          "error, and that "
          "of all chunks so far, which llama-perplexity prints"),
    Field("tests.reference.value", "ga_dense_perplexity", "float", "", "perplexity of the dense model on the "
          "CPU alone"),
    Field("tests.reference.error", "ga_dense_perplexity_error", "float", "", "its standard error"),
    Field("tests.reference.scored", "ga_dense_scored", "int", "count", "predictions it is made of"),
    Field("tests.reference.ratio", "ga_dense_ratio", "float", "ratio", "stock perplexity over the dense model's"),
    Field("tests.prompts", "ga_prompts", "int", "count", "prompt lengths tried (--prompts)"),
    Field("tests.prompts_asked", "ga_prompts_asked", "int", "count", "prompt lengths asked for"),
    Field("tests.prompts_identical", "ga_prompts_identical", "int", "count", "lengths with bitwise equal logits"),
    Field("tests.prompts_different", "ga_prompts_different", "list", "tokens", "lengths without"),
    Field("tests.difference.chunk", "ga_difference_chunk", "int", "", "chunk of the first difference, from 0"),
    Field("tests.difference.prompt", "ga_difference_prompt", "int", "tokens", "or its prompt's length"),
    Field("tests.difference.position", "ga_difference_position", "int", "", "its position there, from 0"),
    Field("tests.difference.layer", "ga_difference_layer", "int", "", "layer of the first tensor that differs; null "
          "outside of layers"),
    Field("tests.difference.tensor", "ga_difference_tensor", "str", "", "that tensor; null where no "
          "difference shows with a "
          "callback at each tensor"),
    Field("tests.difference.stock_repeats", "ga_stock_repeats", "bool", "", "whether stock gives the same "
          "bits twice there"),
    Field("tests.interrupted", "ga_interrupted", "bool", "", "whether this configuration was cut short"),
)  # fmt: skip

FIELDS: tuple[Field, ...] = (*_ABOUT, *_SETTINGS, *_RESULT)

#: Columns of csv and sql rows (jsonl has the lists besides).
COLUMNS: tuple[Field, ...] = tuple(f for f in FIELDS if f.name and f.type != "list")

#: Settings that have a Markdown column only where the user set or varied them: name in Config -> flat column.
OPTIONAL = {
    "n_gpu_layers": "n_gpu_layers", "n_ctx": "ga_n_ctx", "n_batch": "n_batch", "n_ubatch": "n_ubatch",
    "n_threads": "n_threads", "flash_attn": "flash_attn", "no_op_offload": "no_op_offload",
    "overrides": "tensor_buft_overrides",
}  # fmt: skip


def named(name: str) -> Field:
    """The field with this flat name."""
    return next(f for f in FIELDS if f.name == name)


def row(document: Json, test: Json, *, lists: bool = False) -> dict[str, Any]:
    """The flat row of one configuration: every column, in order, None where not measured."""
    return {f.name: f.value(document, test) for f in (FIELDS if lists else COLUMNS) if f.name}


def reference() -> str:
    """The table as Markdown, for the docs."""
    lines = ["| JSON | column | type | SQL | unit | meaning |", "|---|---|---|---|---|---|"]
    for f in FIELDS:
        path = re.sub(r"^tests\.", "tests[].", f.path) or "(derived)"
        name = f"`{f.name}`" if f.name else ""
        lines.append(f"| `{path}` | {name} | {f.type} | {f.sql if f.name else ''} | {f.unit} | {f.doc} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
