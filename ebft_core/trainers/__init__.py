"""Training: `step.py` is the pure step, `ebft.py` the transformers trainer around it, `checkpoints.py` what
survives a crash.
"""
