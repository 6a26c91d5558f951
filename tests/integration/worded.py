"""A random mixture of experts with a vocabulary, for programs that want text: printable ASCII, a character a token."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gguf import GGUFReader, GGUFWriter, TokenType

from ggml_async import models as makers

from . import workload

SPECIAL = ["<unk>", "<s>", "</s>"]
#: SentencePiece writes a space as U+2581.
CHARACTERS = ["\u2581", "\n", *(chr(code) for code in range(0x21, 0x7F))]
TOKENS = SPECIAL + CHARACTERS
ARCH = "qwen3moe"


def make_worded(path: Path, **shape: int) -> Path:
    """Writes the model: the shape of `workload`, but for its vocabulary.

    It has no chat template and never ends a text by itself: </s> is as likely as any other token.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        mute = Path(folder) / "mute.gguf"
        makers.make_synthetic(mute, **{**workload.SHAPE, "n_vocab": len(TOKENS), **shape})
        reader = GGUFReader(mute)
        writer = GGUFWriter(path, ARCH)
        for field in reader.fields.values():
            if not field.name.startswith(("GGUF.", "tokenizer.", "general.architecture")):
                writer.add_key_value(field.name, field.contents(), field.types[0])
        writer.add_tokenizer_model("llama")
        writer.add_token_list(TOKENS)
        # a longer piece would have a higher score; there is none
        writer.add_token_scores([0.0] * len(TOKENS))
        kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
        writer.add_token_types(kinds + [TokenType.NORMAL] * len(CHARACTERS))
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        del reader
    return path
