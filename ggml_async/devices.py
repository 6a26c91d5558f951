"""What the kinds of devices mean to us; one place for it."""

from __future__ import annotations

#: Types of ggml devices that something is read back from.
GPU_TYPES = ("gpu", "igpu")
#: Names in the descriptions of devices that are a CPU in disguise.
SOFTWARE_NAMES = ("llvmpipe", "lavapipe", "swiftshader")


def is_software(description: str) -> bool:
    """Whether a device of this description computes on the CPU: its counts are exact, its timings say nothing."""
    return any(name in description.lower() for name in SOFTWARE_NAMES)
