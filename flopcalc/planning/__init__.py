"""Many devices: layouts, their time, memory and cost."""
