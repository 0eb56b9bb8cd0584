"""A platform plugin of vLLM: its CPU build, for which the GPUs that Ray believes in are its devices."""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuAsGpu(CpuPlatform):
    ray_device_key = "GPU"


def register() -> str:
    return "cpu_as_gpu.CpuAsGpu"
