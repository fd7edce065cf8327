"""Run programs that a model wrote, and find out whether they pass their tests.

`bubblewrap.py` starts a program in namespaces of its own, `seccomp.py` forbids it further processes,
`harness.py` is what runs inside, `checks.py` keeps what the tests expect outside and compares there. Nothing
is ever run without the sandbox: where it cannot be made, `check_sandbox` says why. Imports without torch.
"""

from ebft_core.evaluation.sandbox.bubblewrap import SandboxError
from ebft_core.evaluation.sandbox.checks import Checks, parse_tests
from ebft_core.evaluation.sandbox.judge import Verdict, check_sandbox, run_tests

__all__ = ["Checks", "SandboxError", "Verdict", "check_sandbox", "parse_tests", "run_tests"]
