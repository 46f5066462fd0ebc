"""`AutoSettings` are the keys of `method` where the method is not chosen yet: `dpray plan` compares
all four, and the chains of them that are named."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dpray.config.base import Count, Section


class AutoSettings(Section):
    name: Literal["auto"]
    records: Count = Field(1000, description="synthetic records that are wanted")
    private_prediction: dict[str, Any] = Field(
        {}, description="keys of this method that are not free; so for the other three"
    )
    aug_pe: dict[str, Any] = Field({}, description="keys of Aug-PE that are not free")
    dp_kps: dict[str, Any] = Field(
        {}, description="keys of DP-KPS that are not free: its vocabulary has to be here"
    )
    dp_sgd: dict[str, Any] = Field({}, description="keys of DP-SGD that are not free")
    topics: dict[str, Any] = Field(
        {}, description="keys of topics that are not free, for chains: its public texts are needed"
    )
    chains: tuple[tuple[str, ...], ...] = Field(
        (),
        description="chains that are compared, too: lists of methods, each of which has its keys "
        "from above",
    )
