"""The README's example in Python runs as it stands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, README.name, "exec"), {})
    lines = [json.loads(line) for line in (tmp_path / "out/example/synthetic.jsonl").open()]
    expected = [f"{record['label']} {record['text']}" for record in lines]
    first, *shown = capsys.readouterr().out.splitlines()
    said = re.search(r"cost\.epsilon\)  # (\d+\.\d+): opens no data", example)
    assert said is not None and said.group(1) == f"{float(first):.4f}"
    assert "\n".join(shown[:-1]) == "\n".join(expected)
    assert shown[-1].split()[0] == first and len(lines) == 4
