"""The README's examples are run, in order, on the demo model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hf_paged

README = Path(__file__).resolve().parent.parent / "README.md"


def test_every_python_example_of_the_readme_runs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(examples) >= 3
    names: dict[str, object] = {"path": str(smollm2)}
    for number, example in enumerate(examples):
        exec(compile(example, f"README example {number}", "exec"), names)
    assert "The sky is" in capsys.readouterr().out
    assert isinstance(names["llm"], hf_paged.LLM)
