"""The folder of the real files of benchmarks, and a mark for the tests that read some of them."""

import os
from pathlib import Path

import pytest

REAL_DATA = Path(os.environ.get("AGENTFLOW_DATA") or Path(__file__).parents[3] / "shared" / "data")


def needs(*files: str) -> pytest.MarkDecorator:
    missing = [file for file in files if not (REAL_DATA / file).is_file()]
    return pytest.mark.skipif(bool(missing), reason=f"{REAL_DATA} lacks {', '.join(missing)}; AGENTFLOW_DATA moves it")
