"""The manifests' pods. It needs nothing that is installed, for the audit runs without dpray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def pod_templates(manifest: Any) -> Iterator[dict[str, Any]]:
    """Yield all pod templates in a manifest."""
    if isinstance(manifest, dict):
        if "containers" in manifest.get("spec", {}):
            yield manifest
        for inner in manifest.values():
            yield from pod_templates(inner)
    elif isinstance(manifest, list):
        for inner in manifest:
            yield from pod_templates(inner)
