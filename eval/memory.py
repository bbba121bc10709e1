"""Peak memory of what runs inside a `with` block, where the machine can tell."""

from pathlib import Path

import torch

PROCESS = Path("/proc/self")


class PeakMemory:
    """Largest memory in use while active: of the device, or of the process where the device is the CPU.

    `peak_bytes` is None where neither the device nor the kernel tells.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.peak_bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            self._resettable = reset_process_peak()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        elif self._device.type == "cpu" and self._resettable:
            self.peak_bytes = process_peak()


def reset_process_peak() -> bool:
    """Make the process's present resident size its peak. False where the kernel does not let us."""
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def process_peak() -> int | None:
    """Peak resident size of the process in bytes since the last reset."""
    try:
        lines = (PROCESS / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
