"""The result file and exit status of `benchmarks.exactness`."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exactness import parity as exactness
from benchmarks.exactness.parity import Row


@pytest.mark.parametrize(
    ("second", "status"),
    [({"parameter_error": 1e-8}, 1), ({"parameter_error": 1e-10}, 0), ({"error": "it died"}, 1)],
)
def test_a_model_that_is_not_exact_fails(
    second: dict[str, Any], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = {"loss_error": 0.0, "parameter_error": 0.0}
    found = {"gpt": exact, "llama": exact | second if "error" not in second else second}

    def measure(name: str, setup: str, _: Any) -> Row:
        return Row(name, setup, **found[name])

    monkeypatch.setattr(exactness, "measure", measure)
    path = tmp_path / "rows.json"
    options = ["--models", "gpt,llama", "--setups", "tp2", "--json", str(path)]
    assert exactness.main(options) == status
    written = json.loads(path.read_text())
    assert [(row["model"], row["setup"]) for row in written["rows"]] == [
        ("gpt", "tp2"),
        ("llama", "tp2"),
    ]
    assert written["versions"]["torch"]
