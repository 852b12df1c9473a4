"""Instruments that are used inside a rank: `clock`, `memory`, `collectives`; and `trace`, which writes a run for Perfetto."""
