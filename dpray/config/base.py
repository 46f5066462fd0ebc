"""Every section of the configuration is frozen and refuses unknown keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dpray.io.formats import known_encoding, one_sign

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Delimiter = Annotated[str | None, AfterValidator(one_sign)]
Encoding = Annotated[str | None, AfterValidator(known_encoding)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
