"""Measures the strided step on a given model and machine, against the work it cannot avoid."""
