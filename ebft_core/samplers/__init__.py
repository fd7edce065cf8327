"""Samplers: where the generated blocks come from. `strided.py` rolls out in this process."""
