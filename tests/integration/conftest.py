"""One real llama.cpp in this process for all in-process tests, and a child process for every other ggml.

The device is the first one Vulkan lists: a GPU where there is one, else lavapipe. Nothing here skips for want of one.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ggml_async import fetch, native, runtime
from ggml_async import models as makers
from ggml_async.llama import Context, LlamaLibrary, Model
from ggml_async.native import Host, Mode

from . import workload
from .workload import LAYERS, Logits

# Before anything loads Vulkan (importing ggml_async does not); a developer's own settings must not reach the tests.
os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")
os.environ.setdefault("GGML_VK_DISABLE_FUSION", "1")
for _name in ("GGML_ASYNC", "GGML_BACKEND_PATH"):
    os.environ.pop(_name, None)

HOSTS = Path(__file__).parent / "hosts"
#: Seconds for one child: the first run on a machine compiles every shader for lavapipe, on two cores.
CHILD_TIMEOUT = 400


@pytest.fixture(scope="session")
def llama() -> LlamaLibrary:
    """The pinned runtime (or the one GGML_ASYNC_LLAMA names), with a GPU that reads asynchronously."""
    chosen = os.environ.get("GGML_ASYNC_LLAMA")
    library = runtime.load(runtime.select(Path(chosen) if chosen else fetch.ensure_runtime()))
    logging.getLogger("ggml_async.llama").setLevel(logging.ERROR)
    gpus = [device for device in library.devices() if device.is_gpu]
    assert gpus and gpus[0].async_, f"no device with asynchronous reads (mesa-vulkan-drivers?): {library.devices()}"
    return library


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts: 4 layers, 8 experts, 2 used."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    makers.make_synthetic(path, **workload.SHAPE)
    return path


@pytest.fixture(scope="session")
def load(llama: LlamaLibrary, model_path: Path) -> Iterator[Callable[[int], Model]]:
    """load(n): the model with the experts of its first n layers on the CPU, everything else on the GPU."""
    loaded: dict[int, Model] = {}

    def get(n_cpu_moe: int) -> Model:
        if n_cpu_moe not in loaded:
            loaded[n_cpu_moe] = llama.load_model(model_path, overrides=workload.overrides(n_cpu_moe))
        return loaded[n_cpu_moe]

    yield get
    for model in loaded.values():
        model.close()


@pytest.fixture(scope="session")
def bare(load: Callable[[int], Model]) -> dict[int, Logits]:
    """Logits by n_cpu_moe from before the plug-in was ever attached: nothing of ours was in the process's ggml."""
    assert not native.native().lib.ggml_async_host_count(), "the plug-in is attached already"
    found = {}
    for n_cpu_moe in (0, 1, LAYERS // 2, LAYERS):
        with new_context(load(n_cpu_moe)) as context:
            found[n_cpu_moe] = workload.run(context)
    return found


@pytest.fixture(scope="session")
def attached(llama: LlamaLibrary, bare: dict[int, Logits]) -> Host:
    """The host of this process; after `bare`, so that its logits are from before."""
    return native.attach(llama.ggml_library)


@pytest.fixture
def host(attached: Host, llama: LlamaLibrary) -> Iterator[Host]:
    """The host in async mode with counters at zero, attached again if a test had detached it."""
    assert native.attach(llama.ggml_library).id == attached.id
    attached.mode = Mode.ASYNC
    attached.reset_counters()
    yield attached
    native.attach(llama.ggml_library)
    attached.mode = Mode.ASYNC


def new_context(model: Model, **settings: Any) -> Context:
    """A context as all tests use it, unless they say otherwise."""
    return model.context(**{"n_ctx": 128, "n_threads": 2, **settings})


def child(
    script: str, *arguments: str | Path, env: dict[str, str] | None = None, path: Sequence[Path] = ()
) -> tuple[dict[str, Any], str]:
    """Runs hosts/`script` in a process of its own: (the JSON object it printed last, its stderr)."""
    root = Path(native.__file__).parents[1]
    python_path = os.pathsep.join(str(p) for p in (*path, root, HOSTS, HOSTS.parent))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(HOSTS / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT,
        env={**os.environ, "PYTHONPATH": python_path, **(env or {})},
        check=False,
    )
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
