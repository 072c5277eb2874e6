"""What the device could do at best, to say how much of it a run uses."""

from __future__ import annotations

import torch

# Dense bf16 FLOP/s from the makers' data sheets, by a part of the device's name; the first that fits counts.
PEAK_BF16 = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 FLOP/s of `device`, None where we do not know it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16.items() if part in name), None)
