"""Values that a loop gives for a record: numbers as they are, tensors as copies that may still be on their way."""

from __future__ import annotations

import math
from typing import Any

from flopcalc.monitor.device import Device
from flopcalc.monitor.messages import Say


def is_tensor(value: Any) -> bool:
    return hasattr(value, "is_cuda") and hasattr(value, "detach")


def find_whole(tensor: Any) -> Any:
    """Of a distributed tensor what is here, if that is all of it; None if it is not.

    To read the others ranks would have to talk, and one that has no monitor would never answer.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    return tensor.to_local() if all(each.is_replicate() for each in placements) else None


def read_value(value: Any, device: Device | None, copies: list[Any], say: Say) -> Any:
    """A number; of a tensor on the device a copy that will arrive, which is added to `copies`; None stays."""
    if type(value) is float or value is None:
        return value
    try:
        if not hasattr(value, "is_cuda"):
            return float(value)
        whole = find_whole(value)
        if whole is None:
            raise ValueError("ranks would have to talk to know it; give .full_tensor()")
        if whole.is_cuda and device is not None and not device.is_capturing():
            held = device.fetch(whole)
            copies.append(held)
            return held
        if whole.is_cpu:
            return float(whole.item())
        say(f"a value on {whole.device} is not read: that would stall the device", "value device")
        return math.nan
    except (TypeError, ValueError, RuntimeError) as error:
        say(f"a value given for the record is no number, and left out: {value!r:.60}: {error}", "value type")
        return math.nan


def read_number(value: Any, say: Say) -> float:
    """A number that is on the host; NaN where it is none."""
    if value is None:
        return math.nan
    if is_tensor(value) and value.is_cuda:
        say(f"a dataset's value on {value.device} is not read: give a number", "dataset value")
        return math.nan
    return float(read_value(value, None, [], say))
