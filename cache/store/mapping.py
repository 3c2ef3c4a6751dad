"""Files mapped into memory, without a file descriptor each.

Python's own mapping keeps a descriptor open for as long as it lives (up to 3.12 there is no way
around that), and a cache of a million texts has more shards than a process may have open files.
"""

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from enginecast.runtime.values.arrays import Array

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


FileId = tuple[int, int, int]


def file_id(status: os.stat_result) -> FileId:
    """What tells a file from one that takes its name, or that was written anew."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


class FileBytes:
    """A file's bytes, mapped where its file system can do that, else read when they are asked for.

    They are those of the file that was there at first, or an OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = os.open(path, os.O_RDONLY)
        try:
            status = os.fstat(descriptor)
            self.size = status.st_size
            self._id = file_id(status)
            self._mapped = map_file(descriptor, self.size)
        except OSError:  # some network disks, or too many mappings
            self._mapped = None
        finally:
            os.close(descriptor)

    def read(self, begin: int, end: int) -> Array:
        """uint8 [end - begin], fewer at the end of the file; not to be written to.

        Raises:
            FileNotFoundError: it is not mapped, and was taken out or replaced since it was opened.
            OSError: it cannot be read.
        """
        if self._mapped is not None:
            return self._mapped[begin:end]
        with self._path.open("rb", buffering=0) as file:
            if file_id(os.fstat(file.fileno())) != self._id:
                raise FileNotFoundError(errno.ENOENT, "replaced since it was opened", self._path)
            return np.fromfile(file, np.uint8, max(0, end - begin), offset=begin)


class _Pages:
    """Memory that arrays share, given back with the last of them."""

    def __init__(self, address: int, size: int) -> None:
        data = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True)}
        self.__array_interface__ = data
        # Not `__del__`: by the time the interpreter ends, this module may be empty.
        weakref.finalize(self, _LIBC.munmap, address, size).atexit = False


def map_file(descriptor: int, size: int) -> Array | None:
    """Map a file for reading: uint8 [size]; None for an empty one, which no system can map."""
    if not size:
        return None
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return np.asarray(_Pages(address, size))
