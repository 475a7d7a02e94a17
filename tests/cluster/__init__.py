"""Emulated clusters: several nodes with shaped links between them on one machine."""
