"""Programs in the sandbox: honest ones get the verdict Python gives, hostile ones get nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ebft_core.config import SandboxConfig
from ebft_core.errors import UserError
from ebft_core.evaluation.sandbox import Verdict, check_sandbox, parse_tests, run_tests
from ebft_core.evaluation.sandbox import judge as judging
from ebft_core.evaluation.sandbox.bubblewrap import REPORT_BYTES, Outcome, SandboxError
from ebft_core.evaluation.sandbox.checks import decode
from ebft_core.evaluation.sandbox.harness import encode
from ebft_core.evaluation.sandbox.judge import judge

BOUNDS = SandboxConfig(timeout_seconds=20.0, memory_mb=256, disk_mb=4)
SHORT = SandboxConfig(timeout_seconds=1.0, memory_mb=256, disk_mb=4)
ROOT = Path(__file__).parents[2]


def _missing() -> str:
    try:
        check_sandbox()
    except UserError as error:
        return error.render()
    return ""


REASON = _missing()
needs_sandbox = pytest.mark.skipif(bool(REASON), reason=f"no sandbox here: {REASON}")


def verdict(program: str, tests: str = "assert f() == 3", bounds: SandboxConfig = BOUNDS) -> Verdict:
    return run_tests(program, parse_tests(tests), bounds)


PAIRS = {  # tests that Python itself passes with the first program, and fails with the second
    "a literal": ("assert f() == 3", "def f(): return 3", "def f(): return 4"),
    "both sides": ("assert f() == sum([1, 2])", "def f(): return 3", "def f(): return 4"),
    "order": ("assert f() < 3", "def f(): return 2", "def f(): return 3"),
    "in": ("assert f() in (1, 2)", "def f(): return 2", "def f(): return 3"),
    "is": ("assert f() is None", "def f(): pass", "def f(): return 0"),
    "truth": ("assert isinstance(f(), list)", "def f(): return []", "def f(): return ()"),
    "not": ("assert not f()", "def f(): return []", "def f(): return [0]"),
    "chain": ("assert 1 < f() < 3", "def f(): return 2", "def f(): return 3"),
    "nearly": ("assert abs(f() - 0.3) < 1e-9", "def f(): return 0.1 + 0.2", "def f(): return 0.31"),
    "a loop": ("for i in (0, 2):\n    assert f(i) == i * i", "def f(i): return i * i", "def f(i): return i"),
    "types": ("assert f() == (1, [2.5, b'x'], {'a': {3}})",
              "def f(): return (1, [2.5, b'x'], {'a': {3}})",
              "def f(): return [1, [2.5, b'x'], {'a': {3}}]"),
    "an error wanted": ("try:\n    f()\n    assert False\nexcept ValueError:\n    pass\nassert f",
                        "def f(): raise ValueError", "def f(): return 3"),
    "a check function": ("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
                         "def f(x): return x + 1", "def f(x): return x"),
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("case", PAIRS)
def test_the_verdict_is_python_s_own(case: str) -> None:
    tests, good, bad = PAIRS[case]
    names: dict[str, object] = {}
    exec(f"{good}\n{tests}", names)
    with pytest.raises(AssertionError):
        exec(f"{bad}\n{tests}", {})
    assert verdict(good, tests).passed
    assert not verdict(bad, tests).passed


HOSTILE = {
    "equals everything": ("class E:\n    def __eq__(s, o): return True\ndef f(): return E()", "type E"),
    "prints a verdict": ("print('passed'); print('{\"event\": \"end\"}')\ndef f(): return 4", "not hold"),
    "leaves early": ("import os\nos._exit(0)", "with status 0"),
    "leaves politely": ("import sys\nsys.exit(0)", "with status 0"),
    "forks": ("import os\nos.fork()\ndef f(): return 3", "not permitted"),
    "starts a program": ("import subprocess\nsubprocess.run(['/bin/true'])", "not permitted"),
    "network": ("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)", "unreachable"),
    "reads accounts": ("open('/etc/passwd').read()", "No such file"),
    "reads the home": (f"import os\nos.listdir({str(Path(__file__).parent)!r})", "No such file"),
    "reads the environment": ("import os\nraise KeyError(os.environ['SECRET'])", "KeyError: 'SECRET'"),
    "sees processes": ("import os\nos.listdir('/proc')", "No such file"),
    "writes outside": ("open('/usr/x', 'w')", "Read-only"),
    "writes to the root": ("open('/x', 'w')", "Read-only"),
    "writes to shared memory": ("open('/dev/shm/x', 'w')", "Read-only"),
    "fills the disk": ("for i in range(9): open(f'/tmp/{i}', 'wb').write(b'0' * 2**20)", "No space"),
    "a large file": ("open('/tmp/x', 'wb').write(b'0' * 2**23)", "too large"),
    "memory": ("x = bytearray(2**30)", "MemoryError"),
    "memory out of sight": ("import os\nos.memfd_create('x')", "not permitted"),
    "kills everybody": (
        "import os\nfor pid in (os.getppid(), 1, 0, -1): os.kill(pid, 9)\ndef f(): return 3", "with status"
    ),
    "a namespace of its own": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError('refused')", "refused"
    ),
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_programs_get_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    program, reason = HOSTILE[case]
    found = verdict(program)
    assert not found.passed
    assert reason in found.reason


FOREVER = {
    "sleeps": "import time\ntime.sleep(600)",
    "prints without end": "while True: print('x' * 10000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "ignores signals": "from signal import *\nfor s in (1, 2, 15, 24): signal(s, SIG_IGN)\nwhile True: pass",
}


@needs_sandbox
@pytest.mark.parametrize("case", FOREVER)
def test_the_clock_is_outside_and_nothing_stays_behind(case: str) -> None:
    before = {process.pid for process in psutil.process_iter()}
    started = time.monotonic()
    assert verdict(FOREVER[case], bounds=SHORT) == Verdict(False, "out of time")
    assert time.monotonic() - started < 10.0
    mine = psutil.Process().children(recursive=True)
    assert not [child for child in mine if child.pid not in before]


@needs_sandbox
def test_reports_of_the_program_s_own_are_bounded_and_useless() -> None:
    write = "import os\nfor fd in range(4, 32):\n    try:\n        {}\n    except OSError: pass\n"
    flood = write.format("while True: os.write(fd, b'{}\\n' * 9999)")
    assert verdict(flood).reason == "reported too much"
    # The shape of the reports is known, the expected value is not.
    fake = write.format('os.write(fd, b\'{"event": "check", "number": 0, "left": ["int", "0x4"]}\\n\')')
    assert not verdict(f"{fake}def f(): return 3").passed
    nonsense = write.format("os.write(fd, b'nonsense\\n')")
    assert "cannot be read" in verdict(f"{nonsense}def f(): return 3").reason


@needs_sandbox
def test_no_file_of_ours_is_open_inside() -> None:
    program = (
        "import os, stat\nkinds = []\nfor fd in range(32):\n"
        "    try: kinds.append(stat.S_IFMT(os.fstat(fd).st_mode))\n    except OSError: pass\n"
        "def f(): return [kinds.count(kind) for kind in (stat.S_IFREG, stat.S_IFSOCK, stat.S_IFIFO)]"
    )
    assert verdict(program, "assert f() == [0, 0, 1]").passed  # the pipe of the reports


@needs_sandbox
def test_threads_are_allowed_and_set_order_is_fixed() -> None:
    program = "import threading\nfound = []\nt = threading.Thread(target=found.append, args=(3,))\n"
    assert verdict(f"{program}t.start()\nt.join()\ndef f(): return found[0]").passed
    order = "x = list(map(hash, 'abc'))\ndef f(): raise KeyError(x)"
    assert verdict(order).reason == verdict(order).reason


@needs_sandbox
def test_nothing_survives_the_death_of_the_evaluation() -> None:
    """SIGKILL for the process that waits for the sandbox ends the sandbox."""
    code = (
        "from ebft_core.config import SandboxConfig\n"
        "from ebft_core.evaluation.sandbox import parse_tests, run_tests\n"
        "run_tests('import time; time.sleep(600)', parse_tests('assert x'), SandboxConfig())"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    watched = psutil.Process(parent.pid)
    deadline = time.monotonic() + 30.0
    while len(inside := watched.children(recursive=True)) < 3:  # two of bubblewrap's and the program
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(inside, timeout=10.0)[1]


@pytest.mark.parametrize(
    "value",
    [None, True, "ä\ud800", -(10**5000), 0.1, float("inf"), 1 - 2j, b"\x00\xff", [1, (2,), [{3}]],
     frozenset({1}), {(1, 2): [None]}],
    ids=lambda value: type(value).__name__,  # the large number has no text
)  # fmt: skip
def test_plain_values_keep_their_types(value: object) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("source", ["", "f(1)", "assert False", "assert (", "x" + "[" * 9999])
def test_tests_must_assert_something(source: str) -> None:
    with pytest.raises(ValueError, match="tests"):
        parse_tests(source)


def test_what_is_expected_stays_outside() -> None:
    checks = parse_tests("assert f(2) == 'expected'\nassert 'other' in f(3)")
    assert "f(2)" in checks.source
    assert "expected" not in checks.source
    assert "other" not in checks.source


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        (b"", "with status 0"),
        (b'{"event": "end"}\n', "never reached: assert f() == 3"),
        (b'{"event": "check", "number": 0, "left": ["int", "0x3"], "right": null}\n', "ended before"),
        (b'{"event": "check", "number": 7, "left": ["int", "0x3"], "right": null}\n', "cannot be read"),
        (b'{"event": "check", "number": 0, "left": ["int", 3], "right": null}\n', "cannot be read"),
        (b"[" * 99999 + b"\n", "cannot be read"),
        (b'{"event": "end"}', "ended before"),  # half a line
    ],
)
def test_only_complete_reports_pass(reports: bytes, reason: str) -> None:
    assert len(reports) < REPORT_BYTES
    found = judge(Outcome(reports, "exited", 0), parse_tests("assert f() == 3"))
    assert not found.passed
    assert reason in found.reason


def test_without_bubblewrap_it_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="bubblewrap is not installed"):
        check_sandbox()
    broken = tmp_path / "bwrap"  # what it says where namespaces are switched off
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin")
    with pytest.raises(UserError, match="none can be made") as error:
        check_sandbox()
    assert "No permissions to create new namespace" in str(error.value.value)
    with pytest.raises(SandboxError):  # and a program is not blamed for it
        judging.run_tests("def f(): return 3", parse_tests("assert f() == 3"), BOUNDS)
