"""Every event record agrees with the others, with the counters, and with what the model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ggml_async import native
from ggml_async.llama import Model
from ggml_async.native import Host, Recorder

from .conftest import new_context
from .workload import LAYERS, SHAPE, readback_bytes

Records = np.ndarray[Any, Any]
N_TOKENS = (1, 1, 2)


def record(host: Host, model: Model, mode: str) -> tuple[Records, dict[str, int]]:
    with new_context(model) as context, Recorder() as recorder:
        host.mode = mode
        context.decode([1])
        context.synchronize()
        host.reset_counters()
        recorder.read()
        for n in N_TOKENS:
            context.decode(list(range(n)), logits="all")
            context.synchronize()
        assert recorder.dropped == 0
        return recorder.read(), host.counters()


def of_kind(records: Records, kind: str) -> Records:
    found: Records = records[records["kind"] == native.record_kind(kind)]
    return found


@pytest.mark.parametrize("mode", ["stock", "async"])
def test_a_stage_is_the_sum_of_its_readbacks(host: Host, load: Callable[[int], Model], mode: str) -> None:
    records, counters = record(host, load(LAYERS), mode)
    stages, readbacks = of_kind(records, "stage"), of_kind(records, "readback")
    assert len(stages) == counters["stages"] == LAYERS * len(N_TOKENS)
    assert len(readbacks) == counters["readbacks"] == 2 * len(stages)
    assert stages["bytes"].sum() == counters["readback_bytes"]
    assert stages["duration_ns"].sum() == counters["stage_ns"]
    assert stages["n_sync"].sum() == counters["synchronizes"]
    assert (np.diff(stages["stage"].astype(int)) == 1).all()
    for i, stage in enumerate(stages):
        own = readbacks[readbacks["stage"] == stage["stage"]]
        expected = readback_bytes(N_TOKENS[i // LAYERS])
        assert stage["n_readbacks"] == len(own) == 2
        assert stage["bytes"] == own["bytes"].sum()
        assert own["bytes"].tolist() == list(expected.values())
        names = [name.decode() for name in own["name"]]
        assert [name.split("-")[0] for name in names] == list(expected)
        assert stage["name"] == own["name"][0]
        assert stage["layer"] == i % LAYERS and (own["layer"] == i % LAYERS).all()
        assert stage["n_sync"] == (1 if mode == "async" else 2)
        assert stage["t_ns"] == own["t_ns"][0] < own["t_ns"][1]
        assert (own["duration_ns"] > 0).all()
        assert own["t_ns"][1] + own["duration_ns"][1] <= stage["t_ns"] + stage["duration_ns"]
    ends = stages["t_ns"] + stages["duration_ns"]
    assert (stages["t_ns"][1:] >= ends[:-1]).all(), "stages of one context overlap"


@pytest.mark.parametrize("mode", ["stock", "async"])
def test_records_say_where_and_how_they_were_made(host: Host, load: Callable[[int], Model], mode: str) -> None:
    records, _ = record(host, load(LAYERS), mode)
    stages, readbacks = of_kind(records, "stage"), of_kind(records, "readback")
    devices = [device.type for device in load(LAYERS).library.devices()]
    assert (records["mode"] == ["off", "stock", "async"].index(mode)).all()
    assert (records["host"] == host.id).all()
    assert len(np.unique(records["thread"])) == 1
    assert all(devices[i] in ("gpu", "igpu") for i in np.unique(records["device"]))
    assert (readbacks["decline"] == 0).all()
    assert {native.path_name(path) for path in np.unique(readbacks["path"])} == {
        "direct" if mode == "async" else "stock"
    }
    if mode == "async":
        assert (readbacks["issue_ns"] >= 0).all() and (readbacks["wait_ns"] >= 0).all()
        assert (readbacks["copy_ns"] == -1).all()  # nothing to copy out: the reads landed where they belong
        assert (stages["device_wait_ns"] == -1).all()
        for stage in stages:
            own = readbacks[readbacks["stage"] == stage["stage"]]
            assert stage["issue_ns"] == own["issue_ns"].sum()
            assert (own["wait_ns"] == stage["wait_ns"]).all()
    else:
        assert (readbacks["issue_ns"] == -1).all()
        assert (readbacks["wait_ns"] >= 0).all() and (readbacks["copy_ns"] > 0).all()
        for stage in stages:
            own = readbacks[readbacks["stage"] == stage["stage"]]
            assert stage["device_wait_ns"] == own["wait_ns"][0]
            assert stage["wait_ns"] == own["wait_ns"].sum()
            assert stage["copy_ns"] == own["copy_ns"].sum()


@pytest.mark.parametrize("mode", ["stock", "async"])
def test_uploads_are_seen_too(host: Host, load: Callable[[int], Model], mode: str) -> None:
    records, counters = record(host, load(LAYERS), mode)
    uploads = of_kind(records, "upload")
    assert len(uploads) == counters["uploads"] == (LAYERS + 1) * len(N_TOKENS)
    assert uploads["bytes"].sum() == counters["upload_bytes"]
    assert uploads["duration_ns"].sum() == counters["upload_ns"]
    assert (uploads["duration_ns"] > 0).all()
    expected = []
    for n in N_TOKENS:
        row = 4 * SHAPE["n_embd"] * n
        # the token embedding, then each layer's expert outputs
        expected += [("embd", -1, row)] + [("ffn_moe_down", i, row * SHAPE["n_expert_used"]) for i in range(LAYERS)]
    found = [(u["name"].decode().split("-")[0], int(u["layer"]), int(u["bytes"])) for u in uploads]
    assert found == expected


def test_a_full_ring_drops_and_counts(host: Host, load: Callable[[int], Model]) -> None:
    with new_context(load(LAYERS)) as context, Recorder(capacity=64) as recorder:
        per_token = 3 * LAYERS + LAYERS + 1
        n = 64 // per_token + 2
        for token in range(n):
            context.decode([token])
            context.synchronize()
        kept = len(recorder.read())
        # The ring may be larger than asked for, as an earlier recorder's is used again.
        assert kept + recorder.dropped == n * per_token and kept >= 64
