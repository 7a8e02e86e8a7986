"""Devices, interconnects, prices and measured tables."""
