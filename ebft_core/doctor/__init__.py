"""`ebft doctor`: what can be found out about a machine and a run file before a run is tried."""

from ebft_core.doctor.check import Check, guarded

__all__ = ["Check", "guarded"]
