"""The layout of the checkout: what each file is for, how long it may be, and which may
import which."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYOUT = ROOT / "docs" / "layout.md"
SOURCE = ("pallas_kernels", "sparsejax", "experiments")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for folder in SOURCE
    for path in (ROOT / folder).rglob("*.py")
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_every_file_has_its_line():
    """The layout table names each module, and no module that is not there."""
    there = set(map(name_of, MODULES.values()))
    lines = LAYOUT.read_text().splitlines()
    named = [match[1] for line in lines if (match := re.match(r"\| `(\S+\.py)`", line))]
    assert len(named) == len(set(named))
    assert set(named) == {name for name in there if not name.endswith("__init__.py")}


def test_no_file_is_too_long_to_read_and_no_folder_too_full():
    """A file has at most 450 lines, and a folder a dozen modules."""
    modules: dict[Path, int] = {}
    for folder in (*SOURCE, "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "__init__.py":
                modules[path.parent] = modules.get(path.parent, 0) + 1
            lines = path.read_text().count("\n")
            assert lines <= 450, (name_of(path), lines)
    full = {name_of(path): count for path, count in modules.items() if count > 12}
    assert modules[ROOT / "sparsejax"] and not full


def imported_by(path: Path) -> set[str]:
    """Returns the modules of ours that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, (name_of(path), node.lineno)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for name in found if (module := module_of(name))}


def module_of(name: str) -> str | None:
    """Returns the module of ours that a dotted name is, or is a name in."""
    outer = name.rpartition(".")[0]
    candidates = (name, f"{name}.__init__", outer, f"{outer}.__init__")
    return next((of for of in candidates if of in MODULES), None)


IMPORTS = {name: imported_by(path) - {name} for name, path in MODULES.items()}


def test_no_file_imports_itself_by_a_detour():
    # TopologicalSorter raises CycleError, which names the files.
    order = list(TopologicalSorter(IMPORTS).static_order())
    assert set(order) == set(MODULES)


def test_the_kernels_of_an_architecture_are_imported_by_their_set_alone():
    kernels = "pallas_kernels.sm90."
    importers = {
        module
        for module, others in IMPORTS.items()
        if module.startswith("sparsejax.")
        and any(other.startswith(kernels) for other in others)
    }
    ours = "sparsejax.ops.kernels.hopper"
    parts = ("packing", "dense_rows", "lookups")
    assert importers == {ours, *(f"{ours}_{part}" for part in parts)}


def room_of(module: str) -> str:
    """Returns the package that a module lies in or, inside of `sparsejax`, the package
    and the folder."""
    package, *inner = module.split(".")
    in_folder = package == "sparsejax" and len(inner) > 1
    return f"{package}/{inner[0]}" if in_folder else package


def test_folders_import_from_those_above_them_in_the_layout():
    headings = re.findall(r"^## `(\S+)/`$", LAYOUT.read_text(), re.MULTILINE)
    place = {room: number for number, room in enumerate(headings)}
    imports = {
        (room_of(module), room_of(other))
        for module, others in IMPORTS.items()
        # It has the names for users, from everywhere.
        if module != "sparsejax.__init__"
        for other in others - {"sparsejax.__init__"}
    }
    assert ("sparsejax/training", "sparsejax/models") in imports
    assert not [pair for pair in imports if place[pair[1]] > place[pair[0]]]
