"""The device to train on."""

from __future__ import annotations

import torch

from skerry_learner.errors import DeviceError


def choose_device(name: str) -> torch.device:
    """The torch device `name`; `auto` is the first CUDA device, or the CPU if there is none.

    Raises:
        DeviceError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"no such device. device={name}, cause={str(error).splitlines()[0]}. pass another --device, or auto"
        ) from error
    return device
