"""Which device to train on."""

from __future__ import annotations

import torch

from skerry.learner.errors import DeviceError


def choose_device(name: str) -> torch.device:
    """The device called `name`; for `auto` the first CUDA device where there is one, else the processor.

    Raises:
        DeviceError: there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        message = f"no such device: {name}. name another by --device, or auto. {str(error).splitlines()[0]}"
        raise DeviceError(message) from error
    return device
