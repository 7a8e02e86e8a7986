"""How many bytes a step holds on a device: its tensors, one device's share of them, and the peak."""
