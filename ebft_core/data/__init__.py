"""From files to rows of tokens: sources → reader → transform → split → packing → store.

`sources.py` (which files, in which order, with which digests) imports without torch and transformers:
the planner needs it.
"""
