"""Downstream tasks: what the models can do with what they learned, before and after training.

`problems.py` reads them, `check.py` looks before a run whether they can be done, `writing.py` lets a model
answer, `scoring.py` turns answers into statistics, `programs.py` runs generated programs in the sandbox,
`harness_tasks.py` hands over to lm-evaluation-harness, `suite.py` does all of it. All but
`writing.py` and `suite.py` import without torch.
"""
