"""The README and the guides: what they show runs, what they link to is there, and the
lists that must be whole are."""

import ast
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.command.train import read_options
from sparsejax.sparsity.masks import soft_threshold
from tests.support.wide_console import widen

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
EXPERIMENTS = ROOT / "experiments" / "README.md"
GUIDES = sorted(DOCS.glob("*.md"))
FIRST_DAY = DOCS / "first-day.md"
"""The guide whose programs need its commands: `test_first_day` runs both."""
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
RESULTS = sorted((DOCS / "results").glob("*.md"))
DOCUMENTS = [
    README,
    ROOT / "CONTRIBUTING.md",
    EXPERIMENTS,
    *GUIDES,
    *REFERENCE,
    *RESULTS,
]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def test_example_has_fifteen_lines_and_learns():
    (example,) = PROGRAM.findall(README.read_text())
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 15
    names: dict = {}
    exec(example, names)
    losses = [float(loss) for loss in names["losses"]]
    assert losses[-1] < 0.3 * losses[0]
    assert names["ffn"].sparsity.weights is not None


def test_every_setting_that_a_page_names_is_a_flag(monkeypatch, capsys):
    widen(monkeypatch)
    with pytest.raises(SystemExit):
        read_options(["--help"])
    flag = re.compile(r"--(?:phases|model|optimizer|data|mesh)\.[a-z0-9-]*[a-z0-9]")
    known = set(flag.findall(capsys.readouterr().out))
    assert "--phases.router" in known
    for document in DOCUMENTS:
        unknown = set(flag.findall(document.read_text())) - known
        assert not unknown, (name_of(document), unknown)


def test_the_readme_has_at_most_900_words():
    assert len(README.read_text().split()) <= 900


@pytest.mark.parametrize(
    "guide",
    [
        guide
        for guide in GUIDES
        if guide != FIRST_DAY and PROGRAM.search(guide.read_text())
    ],
    ids=name_of,
)
def test_the_programs_of_a_guide_run_one_after_the_other(guide, recwarn):
    # `recwarn` undoes what they do to the filters of warnings.
    names: dict = {}
    for program in PROGRAM.findall(guide.read_text()):
        exec(program, names)
    if "losses" in names:
        losses = [float(loss) for loss in names["losses"]]
        assert losses[-1] < 0.3 * losses[0]


def anchors_of(document: Path) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    text = FENCED.sub("", document.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in words}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_relative_link_and_figure_of_a_document_is_there(document):
    text = FENCED.sub("", document.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        place, _, anchor = target.partition("#")
        path = (document.parent / place) if place else document
        assert path.is_file(), f"{target} of {name_of(document)}"
        if anchor:
            assert anchor in anchors_of(path), f"{target} of {name_of(document)}"


def test_the_readme_links_to_every_guide():
    linked = re.findall(r"\]\((docs/[\w-]+\.md)", README.read_text())
    assert set(linked) == {name_of(guide) for guide in GUIDES}


def test_every_figure_is_shown_and_drawings_have_a_white_background():
    shown = {
        name
        for document in DOCUMENTS
        for name in re.findall(r"!\[[^\]]+\]\(\S*figures/(\S+)\)", document.read_text())
    }
    assert shown == {path.name for path in (DOCS / "figures").iterdir()}
    for name in shown:
        if not name.endswith(".svg"):
            continue
        root = ElementTree.parse(DOCS / "figures" / name).getroot()
        *_, width, height = root.attrib["viewBox"].split()
        first = root.find("{http://www.w3.org/2000/svg}rect")
        assert first is not None
        assert (first.attrib["width"], first.attrib["height"]) == (width, height)
        assert "#ffffff" in str(first.attrib)


def test_the_reference_has_each_public_name_once():
    tree = ast.parse((ROOT / "sparsejax" / "__init__.py").read_text())
    public = [
        f"sparsejax.{name.asname}"
        for line in tree.body
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    ]
    pages = "\n".join(path.read_text() for path in REFERENCE)
    named = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    exported = [name for name in named if name.count(".") == 1]
    assert sorted(exported) == sorted(public)
    assert len(set(named)) == len(named)


def test_the_notebook_has_no_outputs():
    (notebook,) = (DOCS / "notebooks").iterdir()
    cells = json.loads(notebook.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


def test_every_script_and_every_comparison_has_its_row():
    scripts = {
        path.relative_to(EXPERIMENTS.parent).as_posix()
        for path in EXPERIMENTS.parent.rglob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    }
    comparisons = {path.name for path in (EXPERIMENTS.parent / "comparisons").iterdir()}
    rows = re.findall(r"^\| `([\w./-]+)` \|", EXPERIMENTS.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(scripts | comparisons)


# What the essay says in numbers.


def test_the_soft_thresholds_of_the_essay():
    numbers = r"\(([-\d., ]+)\)"
    row = re.compile(rf"^\| {numbers} \| ([\d.]+) \| {numbers} \|$", re.MULTILINE)
    rows = row.findall((DOCS / "how-it-works.md").read_text())
    assert len(rows) == 3
    for given, threshold, shrunk in rows:
        w, expected = (np.array(x.split(","), np.float32) for x in (given, shrunk))
        np.testing.assert_allclose(soft_threshold(jnp.array(w)), expected, atol=1e-6)
        assert np.sort(np.abs(w))[1] == np.float32(threshold)


def test_the_figure_of_a_step_has_the_times_that_were_measured():
    figure = ElementTree.parse(DOCS / "figures" / "step-time.svg").getroot()
    rows = (ROOT / "experiments" / "results" / "bench_step.jsonl").read_text()
    measured = {
        round(row["step_ms"]): row["kernel_ms"]
        for row in map(json.loads, rows.splitlines())
        if "kernel_ms" in row
    }
    svg = "{http://www.w3.org/2000/svg}"
    bars = [
        [str(text.text) for text in group.findall(f"{svg}text")]
        for group in figure.findall(f"{svg}g")
    ]
    bars = [texts for texts in bars if texts[-1].endswith(" ms")]
    assert len(bars) == 3
    for _, *parts, total in bars:
        kernels = measured[int(total.removesuffix(" ms"))]
        kinds = ("dense GEMM", "2:4 GEMM", "attention", "copy")
        known = [str(round(kernels[kind])) for kind in kinds if kind in kernels]
        assert parts[:-1] == known
