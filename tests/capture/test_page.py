"""The code on the page about capturing runs as it stands there."""

from pathlib import Path

from tests.fork_server import ROOT

from stepmark.capture.run import capture_file
from stepmark.model.ops import Optimizer
from stepmark.step.workload import CommOp, ComputeOp

MODEL = """
from torch import nn

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50304, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_the_pages_function_is_captured(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "capture-a-model.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    assert "def build():" in code
    (tmp_path / "train.py").write_text(MODEL + code)
    found = list(capture_file(f"{tmp_path}/train.py:build", 512).expand())
    sent = [one.collective for one in found if isinstance(one, CommOp)]
    # Of the root, which is not given back, and of three layers, which are gathered again.
    assert sent.count("all_gather") == 4 + 3
    assert sent.count("reduce_scatter") == 4
    (update,) = (
        one.op for one in found if isinstance(one, ComputeOp) and isinstance(one.op, Optimizer)
    )
    rows = -(-50304 // 512)
    assert update.num_params == rows * 64 + 3 * (64 + 1)
