"""Libraries of models write no log where they see private texts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dpray.extras import Late

if TYPE_CHECKING:
    from transformers.utils import logging as transformers_logging
else:
    transformers_logging = Late("transformers.utils.logging")


def silence_models() -> None:
    """Turn off the logs and progress bars of the libraries of models in this process, whatever
    level a person has set.

    A line such as "Input ids are automatically padded from 91 to 92" tells the exact length of a
    private text, and those of Ray's actors are kept in its session's folder.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.CRITICAL)
    logging.getLogger("sentence_transformers").setLevel(logging.CRITICAL)
