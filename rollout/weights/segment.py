"""Segments: files of shared memory with a header and one bucket's bytes.

A file below /dev/shm and not `multiprocessing.shared_memory`, whose resource tracker unlinks what
other processes still own. The owner holds a lock on its file for life; the system frees it with the
process, so a file that nobody has locked is an orphan.

A nonce in the header says which bucket is in a buffer that is filled again and again: the sender
zeroes it before it refills the buffer and stamps a new one when the bucket is complete; a handle
names the one it is for, and the receiver compares before and after it reads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import re
import secrets
import stat
import warnings
import weakref
from pathlib import Path

import torch

from rollout.errors import InvalidInputError, WeightUpdateError
from rollout.validation import checked_hex

log = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")

NONCE_BYTES = 16
HEADER_BYTES = 64
"""The nonce, and room so that what follows is aligned as entries are."""

NO_BUCKET = bytes(NONCE_BYTES)


def host_memory() -> str:
    """Equal in processes that can map each other's segments."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not _FOLDER.is_dir() or not boot.exists():
        return secrets.token_hex(16)
    return f"{boot.read_text().strip()} {_FOLDER.stat().st_dev} {os.geteuid()}"


def new_nonce() -> bytes:
    """A random number that no other bucket has."""
    return secrets.token_bytes(NONCE_BYTES)


def checked_nonce(value: object, field: str) -> bytes:
    """A nonce in hexadecimal. Raises InvalidInputError."""
    nonce = checked_hex(value, field)
    if len(nonce) != NONCE_BYTES or nonce == NO_BUCKET:
        raise InvalidInputError(field, value, f"must be {NONCE_BYTES} bytes, not zero")
    return nonce


def refuse_replaced(expected: bytes, found: bytes, field: str) -> None:
    """Raise InvalidInputError if a buffer no longer holds the bucket to be read."""
    if found != expected:
        raise InvalidInputError(
            f"{field}.nonce", expected.hex(),
            "is of a bucket that is no longer in its buffer: handles are valid until the sender is "
            "asked for the one that takes their place",
        )  # fmt: skip


def refuse_refilled(expected: bytes, found: bytes, buffer: str) -> None:
    """Raise WeightUpdateError if a buffer was refilled while its bucket was read."""
    if found != expected:
        raise WeightUpdateError(
            f"the sender refilled {buffer} while it was being read; it must ask for a handle only "
            "when the one whose place it takes has been loaded"
        )


_NAME = re.compile(r"specrollout-[0-9a-f]{32}")


class _Mapped:
    """A mapped file: its nonce and its payload ``flat``, uint8 [bytes]."""

    def __init__(self, name: str, descriptor: int, num_bytes: int, access: int) -> None:
        self.name = name
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, HEADER_BYTES + num_bytes, access=access)
        with warnings.catch_warnings():  # of memory that cannot be written
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            # The tensor holds on to the map: it is unmapped with the last view.
            self.flat = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)

    @property
    def nonce(self) -> bytes:
        """The nonce of the bucket that is in it; zeros while one is being written."""
        return self._map[:NONCE_BYTES]


class OwnedSegment(_Mapped):
    """A segment of this process. It goes with `close`, with this object or with the process.

    Raises WeightUpdateError, with this ``remedy``, where shared memory has no room for it.
    """

    def __init__(self, num_bytes: int, remedy: str = "choose a smaller bucket_bytes") -> None:
        name, descriptor = _create()
        try:
            # Reserved now: a write to a page there is no room for would kill the process.
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + num_bytes)
            super().__init__(name, descriptor, num_bytes, mmap.ACCESS_WRITE)
        except OSError as error:
            _remove(name, descriptor, os.getpid())
            if error.errno != errno.ENOSPC:
                raise
            free = os.statvfs(_FOLDER).f_bavail * os.statvfs(_FOLDER).f_frsize
            raise WeightUpdateError(
                f"{_FOLDER} has {free} bytes free and a segment needs {num_bytes}: {remedy}, "
                "or give the container more (docker run --shm-size)"
            ) from None
        self._remove = weakref.finalize(self, _remove, name, descriptor, os.getpid())
        if torch.cuda.is_initialized():
            self._pin()

    def _pin(self) -> None:
        """Have this process's GPU copy to it without a detour through the driver's memory."""
        cudart, address = torch.cuda.cudart(), self.flat.data_ptr() - HEADER_BYTES
        status = cudart.cudaHostRegister(address, HEADER_BYTES + self.flat.numel(), 0)
        if status == cudart.cudaError.success:
            weakref.finalize(self, cudart.cudaHostUnregister, address)
            return
        log.warning("segment %s stays pageable, and copies are slower: %s", self.name, status)
        with contextlib.suppress(RuntimeError):  # CUDA tells the next launch of the error again
            torch.zeros(1, device="cuda")

    def stamp(self, nonce: bytes) -> None:
        """Say which bucket is in it."""
        self._map[:NONCE_BYTES] = nonce

    def invalidate(self) -> None:
        """Say that what is in it is being replaced."""
        self.stamp(NO_BUCKET)

    def close(self) -> None:
        """Remove the file. Who has it mapped keeps the memory until they let go."""
        self._remove()


class MappedSegment(_Mapped):
    """Another process's segment, which is only read.

    Raises InvalidInputError, naming ``field``, unless ``name`` is that of a segment of this user
    that holds ``num_bytes``.
    """

    def __init__(self, name: str, num_bytes: int, field: str) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidInputError(field, name, f"must be a segment's name: {_NAME.pattern}")
        try:
            descriptor = os.open(_FOLDER / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidInputError(
                field, name,
                f"cannot be opened below {_FOLDER}: {error.strerror}; its sender may have died, or "
                "runs on another host or in another container",
            ) from None  # fmt: skip
        self._close = weakref.finalize(self, os.close, descriptor)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise InvalidInputError(field, name, "must be a file of the user the engine runs as")
        if found.st_size < HEADER_BYTES + num_bytes:
            raise InvalidInputError(
                field, name, f"holds {found.st_size} bytes, too few for a bucket of {num_bytes}"
            )
        super().__init__(name, descriptor, found.st_size - HEADER_BYTES, mmap.ACCESS_READ)

    @property
    def is_removed(self) -> bool:
        """Whether its owner has removed it, or has died and another sender has."""
        return os.fstat(self._descriptor).st_nlink == 0

    def remove_if_orphan(self) -> None:
        """Remove the file where its owner has died. The descriptor may hold its lock then."""
        _remove_if_orphan(self.name, self._descriptor)


def remove_orphans() -> None:
    """Remove the segments whose owner has died."""
    for path in _FOLDER.glob("specrollout-*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # just removed, another user's, or none that this wrote
            continue
        try:
            _remove_if_orphan(path.name, descriptor)
        finally:
            os.close(descriptor)


def _remove_if_orphan(name: str, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # its owner lives
        return
    (_FOLDER / name).unlink(missing_ok=True)


def _create() -> tuple[str, int]:
    """An empty locked file. One that `remove_orphans` found before it was locked is made anew."""
    if not _FOLDER.is_dir():
        raise WeightUpdateError(f"{_FOLDER} is not there: shared memory needs Linux")
    while True:
        name = f"specrollout-{secrets.token_hex(16)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(_FOLDER / name, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)


def _remove(name: str, descriptor: int, owner: int) -> None:
    """Remove the file, unless this is a fork of its owner, which runs the owner's finalizers
    too."""
    if os.getpid() == owner:
        (_FOLDER / name).unlink(missing_ok=True)
    os.close(descriptor)
