"""The README's example runs as it stands there, and learns."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_example_has_fifteen_lines_and_learns():
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 15
    names: dict = {}
    exec(example, names)
    losses = [float(loss) for loss in names["losses"]]
    assert losses[-1] < 0.3 * losses[0]
    assert names["ffn"].sparsity.weights is not None


def test_every_file_has_its_line():
    """The layout table names each module, and no module that is not there."""
    text = README.read_text()
    root = README.parent
    folders = ("sparsejax", "sparsejax/ops", "pallas_kernels", "experiments")
    there = {path.name for folder in folders for path in (root / folder).glob("*.py")}
    layout = text.split("## Layout")[1].split("## Status")[0]
    named = {Path(name).name for name in re.findall(r"`([\w/]+\.py)`", layout)}
    assert named == there - {"__init__.py"}
