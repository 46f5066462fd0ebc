"""`AutoSettings` are the keys of `method` while the method is not chosen yet: `dpray plan` compares
them all."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from dpray.config.base import Count, MethodSettings


class AutoSettings(MethodSettings):
    name: Literal["auto"]
    engines: ClassVar[frozenset[str]] = MethodSettings.engines | {"none"}
    records: Count = Field(1000, description="synthetic records that are wanted")
    private_prediction: dict[str, Any] = Field(
        {}, description="keys of private prediction that are not free"
    )
    aug_pe: dict[str, Any] = Field({}, description="keys of Aug-PE that are not free")
    dp_kps: dict[str, Any] = Field(
        {}, description="keys of DP-KPS that are not free: its vocabulary has to be here"
    )
    dp_sgd: dict[str, Any] = Field({}, description="keys of DP-SGD that are not free")
