"""Child of :mod:`ggml_async.runtime`: loads one llama.cpp folder and prints one line of JSON about it.

A process of its own, so that a library that crashes, hangs or does not fit this machine costs a refusal and no more.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

from . import native
from .errors import GgmlAsyncError
from .llama import LlamaLibrary


def main(directory: Path) -> None:
    """Load, prove the structs, attach the plug-in, list the devices."""
    logging.disable(logging.CRITICAL)
    try:
        library = LlamaLibrary(directory)
        devices = []
        for device in library.devices():
            entry = asdict(device)
            del entry["ptr"]
            devices.append(entry)
        host = native.attach(library.ggml_library)
        info = host.info()
        found = {"llama": library.version, "ggml": info.version, "api_version": info.api_version, "devices": devices}
        host.detach()
    except GgmlAsyncError as error:
        found = {"error": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
