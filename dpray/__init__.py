"""dpray: differentially private synthetic texts, on a laptop or a Ray cluster.

    import dpray

    config = dpray.load("notes.yaml", "privacy.epsilon=2")
    print(dpray.plan(config).cost.epsilon)
    synthetic = dpray.run(config)
    synthetic.to_pandas()

Nothing heavy is imported before a function needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpray.types import Budget, BudgetRefused, DprayError, InputError, Progress, Resumable
from dpray.version import __version__

if TYPE_CHECKING:
    from dpray.api import (
        SyntheticData,
        audit,
        bench,
        check,
        compare,
        evaluate,
        explore,
        load,
        plan,
        rehearse,
        run,
    )
    from dpray.config.config import Config
    from dpray.ledger.ledger import Ledger
    from dpray.progress import progress_bar

__all__ = [
    "Budget",
    "BudgetRefused",
    "Config",
    "DprayError",
    "InputError",
    "Ledger",
    "Progress",
    "Resumable",
    "SyntheticData",
    "__version__",
    "audit",
    "bench",
    "check",
    "compare",
    "evaluate",
    "explore",
    "load",
    "plan",
    "progress_bar",
    "rehearse",
    "run",
]

_ELSEWHERE = {
    "Config": "dpray.config.config",
    "Ledger": "dpray.ledger.ledger",
    "progress_bar": "dpray.progress",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dpray' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_ELSEWHERE.get(name, "dpray.api")), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
