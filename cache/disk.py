"""Writing a cache's files so that they outlast a crash, and what is said when the disk refuses."""

import errno
import os
import re
import uuid
from pathlib import Path

from enginecast.errors import CacheError, MissingError
from enginecast.runtime.staging import flush_folder

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


def write_flushed(path: Path, data: bytes) -> None:
    """Write a file and flush it.

    Raises:
        OSError: the disk failed; a part of the file may be there.
    """
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_once(path: Path, data: bytes) -> None:
    """Write a file unless somebody else has; of several writers one wins, and nobody sees a part.

    Raises:
        OSError: the disk failed; no part of the file is there.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_flushed(temporary, data)
        _link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_folder(path.parent)


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not path.exists():  # the last of several writers wins, within these two lines
            temporary.replace(path)


def is_there(path: Path) -> bool:
    """Whether there is a file or folder of that name.

    Raises:
        CacheError: nobody can tell: the place may not be looked into, say.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise disk_error(path, error) from error
    return True


def disk_error(path: Path, error: Exception) -> CacheError | MissingError:
    """What to raise for an error of the disk; safetensors has its own for what is an OSError."""
    number = getattr(error, "errno", None)
    told = re.search(r"os error (\d+)", str(error))
    if number is None and told:
        number = int(told[1])
    if number in _NO_SPACE:
        return MissingError(
            f"{path.parent}: the disk is full; what was committed before is safe",
            hint="Free some space and run the same command again.",
        )
    return CacheError(f"{path}: {os.strerror(number) if number else error}")
