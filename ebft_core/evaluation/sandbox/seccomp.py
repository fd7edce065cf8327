"""The system calls that a generated program does not get, as a filter for the kernel (classic BPF).

Above all no second process: then the bounds of one process (`setrlimit`) are bounds of the whole program.
Threads are allowed. Memory that those bounds do not see, other namespaces and other programs are out of
reach as well. A refused call fails with `EPERM`.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ebft_core.errors import UserError

_LOAD, _EQUAL, _ABOVE, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_THREAD = 0x00010000
_X32_CALLS = 0x40000000


@dataclass(frozen=True)
class _Machine:
    audit: int
    clone: int
    refused: tuple[int, ...]


_EVERYWHERE = (425,)  # io_uring_setup, whose operations no filter sees
_CLONE3 = 435  # its flags lie in memory, where no filter can look; the C library then falls back to clone

_MACHINES: Mapping[str, _Machine] = {
    # shmget, fork, vfork, ptrace, unshare, setns, memfd_create
    "x86_64": _Machine(0xC000003E, 56, (29, 57, 58, 101, 272, 308, 319)),
    # unshare, ptrace, shmget, setns, memfd_create
    "aarch64": _Machine(0xC00000B7, 220, (97, 117, 194, 268, 279)),
}


def seccomp_filter() -> bytes:
    """The filter for this machine, as `bwrap --seccomp` reads it.

    Raises:
        UserError: a kind of processor whose calls are not known here.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        raise UserError(
            "generated programs cannot be bounded on this kind of processor",
            where="evaluate.tasks",
            value=platform.machine(),
            expected=" or ".join(_MACHINES),
        )
    refuse = _step(_RETURN, _ERRNO | errno.EPERM)
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, machine.audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_ABOVE, _X32_CALLS, 0, 1),  # the second numbering of x86_64
        refuse,
        _step(_EQUAL, _CLONE3, 0, 1),
        _step(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for number in (*machine.refused, *_EVERYWHERE):
        steps += [_step(_EQUAL, number, 0, 1), refuse]
    steps += [
        _step(_EQUAL, machine.clone, 0, 3),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_BITS, _CLONE_THREAD, 1, 0),
        refuse,
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(steps)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction; jumps count the instructions that are passed over."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
