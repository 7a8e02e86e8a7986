"""How long one kernel takes on a device: products, attention, memory-bound calls; and the constants behind it."""
