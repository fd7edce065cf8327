"""The Prefect tasks: each starts one stage program, watches it, and hands on a small reference."""
