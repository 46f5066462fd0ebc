"""The identifiers of licences that a hub of data sets knows."""

from __future__ import annotations

import re

from dpray.types import InputError, did_you_mean

HUB = """
afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0
bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0
cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0
cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0
creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 gemma gfdl
gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 lppl-1.3c mit mpl-2.0 ms-pl ncsa
odbl odc-by ofl-1.1 openrail openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib
"""
LICENSES = HUB.split()

SPDX = {
    **{f"{name}-1.0": name for name in ("c-uda", "odbl", "odc-by", "pddl")},
    "lgpllr": "lgpl-lr",
}
"""Identifiers of SPDX that the hub shortens. It writes all others in small letters, and the GPLs
without what SPDX says of later versions."""


def hub_license(given: str) -> str:
    """Return the hub's identifier of a licence that is written as the hub or SPDX writes it, in any
    case. Raises InputError that names near ones."""
    plain = re.sub(r"[\s_]+", "-", given.strip().lower())
    short = re.sub(r"-only$|-or-later$|(?<=\d)\+$", "", plain)
    found = SPDX.get(short, short)
    if found in LICENSES:
        return found
    begun = [name for name in LICENSES if plain and name.startswith(plain)]
    near = f" (one of {', '.join(begun)}?)" if begun else did_you_mean(plain, LICENSES)
    raise InputError(f"--license: the hub has no licence of this name{near}; `other` is any other")
