"""Write an exporter's files: all or none, and without any trace of this machine in them."""

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import torch

_MADE_BY_WRITER = ("version", "byteorder", ".data/serialization_id")


@contextlib.contextmanager
def all_or_none(folder: Path, names: Iterable[str]) -> Iterator[None]:
    """Remove the files of these names when writing one of them fails."""
    try:
        yield
    except BaseException:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        raise


def copy_archive(source: BinaryIO, target: Path, *, without: tuple[str, ...]) -> None:
    """Copy an archive of torch's; the same records give the same bytes.

    Args:
        without: endings of the names of records that hold paths of the machine that exported.

    Raises:
        OSError: the file cannot be written.
    """
    with target.open("wb") as file:
        kept = _KeptErrors(file)
        writer = torch._C.PyTorchFileWriter(cast(BinaryIO, kept))
        reader = torch._C.PyTorchFileReader(source)
        for name in reader.get_all_records():
            if not name.endswith(without) and name not in _MADE_BY_WRITER:
                record = reader.get_record(name)
                writer.write_record(name, record, len(record))
        writer.write_end_of_file()
        if kept.error is not None:
            raise kept.error


class _KeptErrors:
    """A file whose errors come after the last write: within torch's writer, whose destructor
    writes as well, one would end the process.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = file

    def write(self, data: bytes) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Without warnings and the loggers of these names: none of it helps a user."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
