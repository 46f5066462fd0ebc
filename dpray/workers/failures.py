"""Errors of workers that touch private records, without their words.

Ray keeps the text of an error that a task raised until the cluster ends, and its dashboard shows it
to whoever has the cluster's token. A library's error may quote a record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from dpray.engines.base import EngineError
from dpray.types import DprayError, is_interruption


class WorkerError(Exception):
    """A library's error in a worker, of which only the name is left."""


@contextmanager
def without_words() -> Iterator[None]:
    """Raise an error of the system by its number and one of a library by its name alone. Those of
    dpray pass: they quote no record."""
    try:
        yield
    except (DprayError, EngineError):
        raise
    except OSError as error:
        number = error.errno or 0
        raise OSError(number, os.strerror(number)) from None
    except BaseException as error:
        if is_interruption(error):
            raise
        raise WorkerError(type(error).__name__) from None
