"""The stress driver in a process whose ggml is compiled into xllamacpp. Arguments: build folder, driver options."""

import ctypes
import importlib.util
import sys
from pathlib import Path

import xllamacpp  # noqa: F401  (loads the library)

built = Path(sys.argv[1])
here = built / "tests" / "stress"
(module,) = Path(importlib.util.find_spec("xllamacpp").submodule_search_locations[0]).glob("xllamacpp*.so")
arguments = [
    "stress", "--library", str(module), "--mock", str(here / "libggml-mock.so"),
    "--plugin", str(built / "libggml-async.so"), *sys.argv[2:],
]  # fmt: skip
stress = ctypes.CDLL(str(here / "libstress-driver.so"))
sys.exit(
    stress.stress_main(len(arguments), (ctypes.c_char_p * (len(arguments) + 1))(*[a.encode() for a in arguments], None))
)
