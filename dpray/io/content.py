"""A file's first bytes show its kind where the name does not: a zipped file by another name, the
pointer of Git LFS in place of a file, a web page that was saved as data."""

from __future__ import annotations

from dpray.io.formats import COMPRESSIONS, CONTENTS, base_name
from dpray.types import InputError

FIRST_BYTES = 512
"""Bytes that are looked at."""

POINTERS = {
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer; run git lfs pull",
    b"/annex/objects/": "a git-annex pointer; run git annex get",
}
"""The beginnings of what stands in place of a file, and the remedies."""

SIGNATURES = {
    b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"PK\x03\x04": ".zip",
    b"PAR1": ".parquet", b"ARROW1\0": ".arrow", b"FEA1\0": ".feather", b"\xfd7zXZ\0": ".xz",
    b"7z\xbc\xaf\x27\x1c": ".7z", b"Rar!\x1a": ".rar", b"\x04\x22\x4d\x18": ".lz4",
    b"%PDF-": ".pdf", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": ".xls", b"SQLite format 3\0": ".sqlite",
    b"Obj\x01": ".avro", b"\x89HDF\r\n": ".h5",
}  # fmt: skip
"""The beginnings of files by the endings that their names have."""

_KINDS = CONTENTS | COMPRESSIONS

EXPECTED = {
    kind: tuple(end for end in SIGNATURES.values() if _KINDS.get(end) == kind)
    for kind in _KINDS.values()
} | {"zip": (".zip",), "xlsx": (".xlsx", ".zip")}
"""The endings whose bytes a kind or a compression of files has."""

ADVICE = {
    ".html": "a web page may say why the data was not downloaded",
    ".xls": "save it as .xlsx, without a password",
    ".tar": "unpack it, and give its folder",
}


def check_content(file: str, start: bytes, kind: str | None) -> None:
    """Raise InputError if the first bytes of a file show another kind, or another compression, than
    its name does."""
    name = base_name(file)
    for sign, what in POINTERS.items():
        if start.startswith(sign):
            raise InputError(f"{name}: {what}")
    ending = _ending(start)
    if ending is None or ending in EXPECTED.get(kind or "", ()):
        return
    if kind == "txt" and ending == ".html":
        return
    is_read = any(ending in endings for endings in EXPECTED.values())
    usual = f"end its name in {ending}" if is_read else "convert it to a kind that is read"
    raise InputError(f"{name}: the bytes are those of a {ending} file; {ADVICE.get(ending, usual)}")


def _ending(start: bytes) -> str | None:
    """Return the ending that fits the first bytes; None for those of a text, and unknown ones. A
    text may begin with the letters of a signature, and has no control characters."""
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return ".html"
    if start[257:262] == b"ustar":
        return ".tar"
    if start.startswith(b"PK") and b"[Content_Types].xml" in start:
        return ".xlsx"
    is_text = not any(byte < 9 or 13 < byte < 32 for byte in start)
    for sign, ending in SIGNATURES.items():
        if start.startswith(sign) and not (is_text and sign.isalnum()):
            return ending
    return None
