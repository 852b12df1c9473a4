"""Instruments that are used inside a rank: collectives, clock, memory."""
