"""What the kernel does in some containers, done to this process and those that it starts from now on."""

import ctypes
import errno
import struct

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER, _CHILD_SUBREAPER = 38, 22, 2, 36
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x00050000 | errno.ENOSYS, 0x7FFF0000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def refuse_process_descriptors() -> None:
    """As gVisor and old container runtimes: there is no `pidfd_open`."""
    instructions = [
        (_LOAD, 0, 0, 0),  # the system call's number
        (_IF_EQUAL, 1, 0, _PIDFD_OPEN),
        (_IF_EQUAL, 0, 1, _PIDFD_SEND_SIGNAL),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = _Program(len(instructions), b"".join(struct.pack("HBBI", *each) for each in instructions))
    _prctl(_NO_NEW_PRIVILEGES, 1)
    _prctl(_SECCOMP, _FILTER, ctypes.byref(program))


def get_orphans() -> None:
    """As process 1: the children of a process that has ended become this one's."""
    _prctl(_CHILD_SUBREAPER, 1)


def _prctl(*words: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(*words, *[0] * (5 - len(words))) == 0, ctypes.get_errno()
