"""DeepSpeed, whose import and set-up print to the standard output, which is the command's."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[Any]:
    """The package `deepspeed`; what it has to say goes to the standard error.

    For everything that imports it, if only behind one's back: saving a transformers model does.
    """
    with contextlib.redirect_stdout(sys.stderr):
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # A helper for CPU ranks that would be compiled at the first start: gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        yield deepspeed
