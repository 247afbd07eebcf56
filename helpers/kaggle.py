"""Lessons that stand alone, for Kaggle: the helpers' code as cells, each before its first use.

A lesson's copy holds what the lesson needs of this package and nothing else. What is needed is
found on the syntax tree, by names: they are unique over all modules, and modules import each other
as `from helpers.x import name` only.
"""

from __future__ import annotations

import ast
import base64
import copy
import json
import lzma
import re
import shutil
import symtable
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

# --- On Kaggle -----------------------------------------------------------------------------


def attached_competition(name: str, inputs: str = "/kaggle/input") -> str | None:
    """The folder with the files of a competition that was added as input, or None without it.

    Kaggle mounts it below `inputs`, directly or in `competitions/`, read-only. Where the training
    pictures are in a train.zip, they are unpacked beside the temporary files, once.
    """
    places = [Path(inputs, name), Path(inputs, "competitions", name)]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        print(f"{name} is not among the inputs: this run uses the sample in the notebook.")
        return None
    packed = folder / "train.zip"
    if packed.is_file():
        folder = Path(tempfile.gettempdir(), name)
        unfinished = folder.with_name(f"{name}.unfinished")
        if not folder.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.unpack_archive(packed, unfinished)
            unfinished.rename(folder)
    print(f"data: {folder}")
    return str(folder)


DEFINITIONS = "# Helpers: "  # how a cell of definitions begins


def share_definitions(shell: Any) -> None:
    """Keep this notebook's definition cells in a file, for processes that multiprocessing spawns.

    A spawned process begins by running the main program's file, and a notebook has none. So before
    every cell the definitions are written to one, as they were last run.
    """
    folder = tempfile.TemporaryDirectory()
    main = sys.modules["__main__"]

    def write(*_: Any) -> None:
        cells = {}
        for source in shell.user_ns["In"]:
            if source.startswith(DEFINITIONS):
                cells[source.partition("\n")[0]] = source
        text = "\n\n".join(["from __future__ import annotations", *cells.values()])
        path = Path(folder.name, "definitions.py")
        path.write_text(text + "\n", encoding="utf-8")
        main.__file__ = str(path)
        # What such a process sends back names its classes after its own main module.
        sys.modules["__mp_main__"] = main

    write()
    shell.events.register("pre_run_cell", write)


# --- Names ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """The global names that a piece of code binds, uses, and uses as soon as it runs."""

    bound: frozenset[str]
    used: frozenset[str]
    at_once: frozenset[str]


COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")


def names_in(source: str) -> Names:
    """Sort the names of `source`, a whole number of statements, by Python's own rules of scope."""
    bound, used, at_once = set(), set(), set()

    def visit(table: symtable.SymbolTable, runs_now: bool) -> None:
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            name = symbol.get_name()
            if is_module or symbol.is_declared_global():
                if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                    bound.add(name)
            if symbol.is_referenced() and (is_module or symbol.is_global()):
                used.add(name)
                if runs_now:
                    at_once.add(name)
        for child in table.get_children():
            is_function = child.get_type() == "function" and child.get_name() not in COMPREHENSIONS
            visit(child, runs_now and not is_function)

    visit(symtable.symtable(source, "cell", "exec"), True)
    for text in _annotations_as_text(ast.parse(source)):
        used |= {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return Names(frozenset(bound), frozenset(used), frozenset(at_once))


def _annotations_as_text(tree: ast.AST) -> Iterator[str]:
    """Types that stand in quotes."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            annotation = getattr(node, name, None)
            for part in ast.walk(annotation) if annotation is not None else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


@dataclass(frozen=True, order=True)
class ImportedName:
    """`from source import attribute as name`, or `import source as name` without an attribute."""

    source: str
    attribute: str | None
    name: str  # as it is written after "as", or the same as what is imported
    for_types: bool = False  # below `if TYPE_CHECKING`

    @property
    def binds(self) -> str:
        """The global name that it makes."""
        return self.name if self.attribute or self.name != self.source else _root(self.name)

    @property
    def target(self) -> str:
        """What that name stands for."""
        if self.attribute:
            return f"{self.source}.{self.attribute}"
        return self.source if self.name != self.source else _root(self.source)


def _root(dotted: str) -> str:
    return dotted.partition(".")[0]


def imported_names(node: ast.stmt, for_types: bool = False) -> list[ImportedName]:
    """The names that an import statement makes."""
    if isinstance(node, ast.Import):
        return [ImportedName(a.name, None, a.asname or a.name, for_types) for a in node.names]
    return [ImportedName(node.module, a.name, a.asname or a.name, for_types) for a in node.names]


def format_imports(imports: Iterable[ImportedName], width: int = 88) -> str:
    """Import statements, Python's own modules first, then the others, then those for types."""
    imports = set(imports)
    if any(item.for_types for item in imports):
        imports.add(ImportedName("typing", "TYPE_CHECKING", "TYPE_CHECKING"))
    own = {i for i in imports if _root(i.source) in sys.stdlib_module_names and not i.for_types}
    for_types = {item for item in imports if item.for_types}
    parts = [_import_lines(part, width) for part in (own, imports - own - for_types, for_types)]
    if for_types:
        parts[-1] = "if TYPE_CHECKING:\n" + textwrap.indent(parts[-1], "    ")
    return "\n\n".join(filter(None, parts))


def _import_lines(imports: Iterable[ImportedName], width: int) -> str:
    """One statement for each module, sorted."""
    lines, modules = [], {}
    for item in sorted(imports, key=lambda i: (i.attribute is not None, i.source, i.name)):
        name = item.attribute or item.source
        written = name if name == item.name else f"{name} as {item.name}"
        if item.attribute is None:
            lines.append(f"import {written}")
        else:
            modules.setdefault(item.source, []).append(written)
    for source, names in modules.items():
        line = f"from {source} import {', '.join(names)}"
        if len(line) > width:
            wrapped = textwrap.fill(", ".join(names), width - 4, break_long_words=False)
            line = f"from {source} import (\n{textwrap.indent(wrapped, '    ')},\n)"
        lines.append(line)
    return "\n".join(lines)


# --- The helpers as definitions ------------------------------------------------------------


@dataclass(eq=False)
class Definition:
    """One top-level statement of a module, with the comments above it."""

    module: str
    names: frozenset[str]  # those it binds
    text: str
    section: str | None
    uses: frozenset[str]
    at_once: frozenset[str]


@dataclass
class Library:
    """The helpers' code, module by module in the order in which they can be run."""

    definitions: list[Definition] = field(default_factory=list)
    owners: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, list[ImportedName]] = field(default_factory=dict)  # of each module
    about: dict[str, str] = field(default_factory=dict)  # each module's first sentence

    def closure(self, names: Iterable[str]) -> list[Definition]:
        """The definitions of `names` and of all that they use, in the order of the modules."""
        found: set[Definition] = set()
        left = [self.owners[name] for name in names if name in self.owners]
        while left:
            definition = left.pop()
            if definition not in found:
                found.add(definition)
                left += [self.owners[name] for name in definition.uses if name in self.owners]
                left += [extra for extra in self._effects(definition) if extra not in found]
        return [definition for definition in self.definitions if definition in found]

    def _effects(self, definition: Definition) -> list[Definition]:
        """Statements that bind nothing but change what `definition` made, such as registrations."""
        return [
            other
            for other in self.definitions
            if not other.names
            and other.module == definition.module
            and other.at_once & definition.names
        ]

    def imports_of(self, definitions: Iterable[Definition]) -> set[ImportedName]:
        """What these definitions import from elsewhere."""
        return {
            item
            for definition in definitions
            for item in self.imports[definition.module]
            if item.binds in definition.uses
        }


def read_library(package: Path) -> Library:
    """Read the modules of the package from their files, `__main__` and `__init__` left out."""
    trees = {
        path.stem: (path.read_text(encoding="utf-8"), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted(package.glob("*.py"))
        if not path.stem.startswith("__")
    }
    library = Library()
    for module in _in_order({name: _modules_used(tree) for name, (_, tree) in trees.items()}):
        _read_module(library, module, *trees[module])
    return library


def _modules_used(tree: ast.Module) -> set[str]:
    return {
        node.module.partition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and _is_of_helpers(node)
    }


def _in_order(uses: dict[str, set[str]]) -> list[str]:
    """Modules, each behind those that it uses."""
    done: list[str] = []

    def visit(module: str) -> None:
        for other in sorted(uses[module]):
            visit(other)
        if module not in done:
            done.append(module)

    for module in uses:
        visit(module)
    return done


def _is_of_helpers(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and _root(node.module or "") == "helpers"


SECTION = re.compile(r"# --- (.+?) -+$")


def _read_module(library: Library, module: str, text: str, tree: ast.Module) -> None:
    lines = text.splitlines()
    library.about[module] = re.split(r"(?<=\.)\s", ast.get_docstring(tree))[0].replace("\n", " ")
    imports = library.imports.setdefault(module, [])
    section, end = None, 0
    for node in tree.body:
        start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        above, end = lines[end : start - 1], node.end_lineno
        for line in above:
            match = SECTION.match(line)
            section = match[1] if match else section
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # the docstring
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if not _is_of_helpers(node) and getattr(node, "module", "") != "__future__":
                imports += imported_names(node)
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for part in node.body:
                imports += [] if _is_of_helpers(part) else imported_names(part, True)
            continue
        code = "\n".join(lines[start - 1 : end])
        names = names_in(code)
        comments = [line for line in above if line.startswith("#") and _is_worth_keeping(line)]
        definition = Definition(
            module, names.bound, "\n".join([*comments, code]), section, names.used, names.at_once
        )
        library.definitions.append(definition)
        library.owners |= dict.fromkeys(names.bound, definition)


def _is_worth_keeping(comment: str) -> bool:
    return not SECTION.match(comment) and not comment.startswith("# fmt:")


# --- A lesson's copy -----------------------------------------------------------------------

FUTURE = "from __future__ import annotations  # for all cells: types of a signature stay text"
CHECK = "prepare_kernel()  # says in one sentence what is wrong with this machine, if anything"
SCRIPT_MODULE = "lesson_helpers"
IMPORT_IN_TEXT = re.compile(r"^from helpers\.\w+ import (?:\([^)]*\)|.+)$", re.MULTILINE)
FOLDED = {"jupyter": {"source_hidden": True}, "_kg_hide-input": True}
COMPETITIONS = {
    "jigsaw": "jigsaw-multilingual-toxic-comment-classification",
    "comment_texts": "jigsaw-multilingual-toxic-comment-classification",
    "cats_vs_dogs": "dogs-vs-cats",
}

ABOUT_THE_COPY = """\
**This copy of the lesson stands alone.** It needs no internet and no file beside it: the code of
the tutorial's helpers is in its cells, each before its first use. Where the lesson talks about a
helper you see its code; the rest is in folded cells under the heading *Helpers*. Change one, run
its cell again, and everything that follows uses your version.

A process that starts afresh cannot find what is defined in cells, so the data loaders of a notebook
work without worker processes."""

ABOUT_SHARING = """\
**On a GPU `measure_step` works in a process of its own,** which starts from a file, and a notebook
has none. The next cell keeps one up to date with the helpers' cells, your changes included."""

ABOUT_THE_SCRIPT = f"""\
**Processes that torchrun starts read files, not the cells of a notebook.** So what their script
imports is written to `{SCRIPT_MODULE}.py` here. The file repeats definitions of this notebook: a
change to a helper's cell has no effect on it. To change what the processes do, change the next cell
and run it again."""

ABOUT_THE_DATA = """\
**Your data, or the sample.** If the competition [{name}](https://www.kaggle.com/c/{name}) is among
the notebook's inputs, its files are used, unless the parameter `DATA` names a folder."""

ABOUT_THE_SAMPLE = """\
**The sample of comments** was written for this tutorial. Its three CSV files are packed into the
next cell: compressed with LZMA, the bytes as base64 text. They are unpacked into `data/comments`;
look at them there."""


def export_lesson(notebook: Any, library: Library, sample: Path) -> Any:
    """A copy of a lesson that needs no import from this package.

    sample: the folder with the sample of comments, which travels in the copy where it is needed.
    Raises ValueError, naming the cell, for a lesson that cannot be copied so.
    """
    return _Copy(notebook, library, sample).write()


def write_lessons(lessons: Iterable[Path], root: Path, folder: Path) -> list[Path]:
    """Write a copy of each lesson that stands alone into `folder`; the files.

    root: the repository. Raises ValueError, naming lesson and cell, where that cannot be done.
    """
    library = read_library(root / "helpers")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path in lessons:
        notebook = nbformat.read(path, as_version=4)
        try:
            exported = export_lesson(notebook, library, root / "data" / "comments")
        except ValueError as error:
            raise ValueError(f"{path.name}, {error}") from None
        nbformat.validate(exported)
        nbformat.write(exported, folder / path.name)
        written.append(folder / path.name)
    return written


class _Copy:
    """One lesson on its way into its copy."""

    def __init__(self, notebook: Any, library: Library, sample: Path):
        self.notebook, self.library, self.sample = notebook, library, sample
        self.cells: list[Any] = []
        self.done: set[Definition] = set()
        self.imported: set[ImportedName] = set()  # by cells of definitions
        self.parts: dict[str, int] = {}  # cells of definitions, by module
        self.script: list[str] = []  # names that the lesson's scripts import
        self.shares = False
        self.known: set[str] = set()  # helpers that the lesson has imported so far
        self.bound: dict[str, tuple[str | None, str]] = {}  # by the lesson: what, in which cell
        self.where = ""

    def write(self) -> Any:
        """The copy, cell by cell."""
        cells = [cell for cell in self.notebook["cells"] if cell["source"].strip()]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        for number, cell in enumerate(code, start=1):
            self.where = _place(number, cell)
            try:
                self.script += _names_in_scripts(cell["source"])
            except SyntaxError as error:
                raise ValueError(f"{self.where} is no plain Python: {error}") from None
        number = 0
        for cell in cells:
            if cell["cell_type"] != "code":
                self.cells.append(copy.deepcopy(cell))
                continue
            if number == 0:
                self._add("markdown", ABOUT_THE_COPY)
                self._add("code", FUTURE)
            number += 1
            self.where = _place(number, cell)
            self._copy_code(cell)
        self._refuse_shadows()
        return self._finished()

    # Cells

    def _add(self, kind: str, source: str, folded: bool = False) -> None:
        cell = {"cell_type": kind, "metadata": FOLDED if folded else {}, "source": source.strip()}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        self.cells.append(copy.deepcopy(cell))

    def _copy_code(self, cell: Any) -> None:
        tags = cell["metadata"].get("tags", [])
        if "bootstrap" in tags:  # the package is not needed, but what else it checks is
            self._define(["prepare_kernel"])
            self._add("code", CHECK)
            return
        rest, shown = self._without_helpers(cell["source"])
        names = self._note_names(rest)
        roots = {_root(item) for item in shown}
        needed = {name for d in self.library.closure(names) for name in d.names}
        shown_first = not rest or bool(needed & roots)
        self._define(names | roots if shown_first else names, shown if shown_first else ())
        if any(name in self.script for name in _names_in_scripts(rest)):
            self._write_script()
        rest = IMPORT_IN_TEXT.sub(
            lambda match: re.sub(r"^from helpers\.\w+", f"from {SCRIPT_MODULE}", match[0]), rest
        )
        if re.search(r"\b(from|import) helpers\b|[\"']helpers[\"']", rest):
            raise ValueError(f"{self.where}: it needs the package helpers in a way not known here")
        if rest:
            self._add("code", rest)
            self.cells[-1]["metadata"] = {"tags": list(tags)} if tags else {}
        if not shown_first:
            self._define(roots, shown)
        if "parameters" in tags:
            self._add_data()

    def _without_helpers(self, source: str) -> tuple[str, list[str]]:
        """The cell without imports of helpers and `show_source(...)`, and what that shows."""
        lines = source.splitlines()
        shown: list[str] = []
        for node in ast.parse(source).body:
            taken = _is_of_helpers(node)
            if taken:
                for alias in node.names:
                    if alias.asname or alias.name not in self.library.owners:
                        raise ValueError(f"{self.where}: cannot take {ast.unparse(alias)} along")
                    self.known.add(alias.name)
            elif isinstance(node, ast.Expr) and _calls_show_source(node.value):
                items = [ast.unparse(argument) for argument in node.value.args]
                if any(_root(item) not in self.known for item in items):
                    raise ValueError(f"{self.where}: show_source of what is no helper")
                shown, taken = shown + items, True
            if taken:
                lines[node.lineno - 1 : node.end_lineno] = [None] * (
                    node.end_lineno - node.lineno + 1
                )
        rest = "\n".join(line for line in lines if line is not None)
        return re.sub(r"\n{4,}", "\n\n\n", rest).strip(), shown

    def _note_names(self, source: str) -> set[str]:
        """Remember what a cell binds; the helpers that it uses."""
        names = names_in(source)
        targets = {
            item.binds: item.target
            for node in ast.walk(ast.parse(source))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for item in imported_names(node)
        }
        for name in names.bound:
            self.bound.setdefault(name, (targets.get(name), self.where))
            if targets.get(name) != self.bound[name][0]:
                self.bound[name] = (None, self.where)
        return set(names.used & self.known)

    # Definitions

    def _define(self, names: Iterable[str], shown: Sequence[str] = ()) -> None:
        """Add what `names` need and no earlier cell has defined; `shown` stands in open cells."""
        again = [item for item in shown if self.library.owners[_root(item)] in self.done]
        new = [d for d in self.library.closure(names) if d not in self.done]
        visible = {self.library.owners[_root(item)] for item in shown}
        modules = list(dict.fromkeys(definition.module for definition in new))
        if modules:
            about = [f"*{m}*: {self._titles(d for d in new if d.module == m)}" for m in modules]
            self._add("markdown", f"**Helpers.** {'; '.join(about)}.")
        for module in modules:
            self._define_from(module, [d for d in new if d.module == module], visible)
        self._show_again(again)
        spawns = any('get_context("spawn")' in definition.text for definition in new)
        if spawns and not self.shares:
            self.shares = True
            self._define(["share_definitions"])
            self._add("markdown", ABOUT_SHARING)
            self._add("code", "share_definitions(get_ipython())")

    def _titles(self, definitions: Iterable[Definition]) -> str:
        """What definitions of one module are about: their sections, or what the module says."""
        definitions = list(definitions)
        titles = dict.fromkeys(d.section for d in definitions if d.section)
        return ", ".join(titles) or self.library.about[definitions[0].module].rstrip(".")

    def _define_from(self, module: str, new: list[Definition], visible: set[Definition]) -> None:
        """Cells with a module's definitions: folded ones, and those of `visible` open."""
        first, then = [], []  # folded, before and after what is shown
        late = {d for d in new if d in visible}
        for definition in new:
            if definition in visible:
                continue
            # What a definition needs while it is made must be there, with all that it needs.
            at_once = set(self.library.closure(definition.at_once)) - {definition}
            if at_once & late:
                late.add(definition)
                then.append(definition)
            else:
                first.append(definition)
        for definitions, folded in (
            (first, True), ([d for d in new if d in visible], False), (then, True)
        ):  # fmt: skip
            if definitions:
                self._add_definitions(module, definitions, folded)

    def _add_definitions(self, module: str, definitions: list[Definition], folded: bool) -> None:
        self.parts[module] = self.parts.get(module, 0) + 1
        number = self.parts[module]
        title = f"{DEFINITIONS}{module}" + (f", part {number}" if number > 1 else "")
        imports = self.library.imports_of(definitions) - self.imported
        head = "\n\n".join(filter(None, [title, format_imports(imports)]))
        self._add("code", f"{head}\n\n\n{join_definitions(definitions)}", folded)
        self.imported |= imports
        self.done |= set(definitions)

    def _show_again(self, items: Sequence[str]) -> None:
        """The code of helpers that had to be defined further up, to be read here."""
        if not items:
            return
        code = "\n\n\n".join(_source_of(self.library, item) for item in items)
        names = ", ".join(f"`{item}`" for item in items)
        self._add("markdown", f"({names}, defined above:)\n\n````python\n{code}\n````")

    # What stands beside the lesson's own cells

    def _write_script(self) -> None:
        definitions = self.library.closure(self.script)
        self.script = []
        text = [
            f"%%writefile {SCRIPT_MODULE}.py",
            '"""What the processes of torchrun need of the helpers."""',
            f"\n{FUTURE.partition('  #')[0]}\n",
            format_imports(self.library.imports_of(definitions)),
            f"\n\n{join_definitions(definitions)}",
        ]
        self._add("markdown", ABOUT_THE_SCRIPT)
        self._add("code", "\n".join(text), folded=True)

    def _add_data(self) -> None:
        names = {COMPETITIONS[name] for name in COMPETITIONS if name in self.known}
        if not names:
            return
        name = max(names)  # jigsaw where a lesson has both: DATA is one folder
        self._add("markdown", ABOUT_THE_DATA.format(name=name))
        self._define(["attached_competition"])
        self._add("code", f'if DATA is None:\n    DATA = attached_competition("{name}")')
        if name.startswith("jigsaw"):
            self._add("markdown", ABOUT_THE_SAMPLE)
            code = pack_sample(self.sample)
            self._note_names(code)
            self._add("code", code, folded=True)

    def _refuse_shadows(self) -> None:
        """Stop where a name would stand for two things, of which the helpers need one."""
        needed: dict[str, tuple[str, str]] = {}
        bindings = [(name, (f"helpers.{d.module}.{name}", d.module)) for d in self.done
                    for name in d.names]  # fmt: skip
        bindings += [(item.binds, (item.target, "imports")) for item in self.imported]
        for name, (target, owner) in bindings:
            if needed.setdefault(name, (target, owner))[0] != target:
                raise ValueError(f"{name} is {target} and {needed[name][0]}: rename one of them")
        for name, (target, where) in self.bound.items():
            if name in needed and needed[name][0] != target:
                raise ValueError(
                    f"{where} gives the name {name} to something else, and in the copy the helpers "
                    f"need it as {needed[name][0]}: rename it in the lesson"
                )

    def _finished(self) -> Any:
        for number, cell in enumerate(self.cells):
            cell["id"] = f"cell-{number}"
        metadata = {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            "kaggle": {
                "isInternetEnabled": False,
                "language": "python",
                "sourceType": "notebook",
            },
        }
        content = {"cells": self.cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
        return nbformat.from_dict(content)


def _place(number: int, cell: Any) -> str:
    return f"code cell {number} (`{cell['source'].strip().splitlines()[0]}`)"


def _calls_show_source(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "show_source"


def _names_in_scripts(source: str) -> list[str]:
    """Helpers that texts in a cell import: scripts that will run in processes of their own."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    statements = [match for text in texts for match in IMPORT_IN_TEXT.findall(text)]
    return [alias.name for text in statements for alias in ast.parse(text).body[0].names]


def join_definitions(definitions: Sequence[Definition]) -> str:
    """Definitions as the body of one module, with the titles of its sections."""
    sections = {(d.module, d.section) for d in definitions}
    text, last = "", None
    for definition in definitions:
        section = (definition.module, definition.section)
        if section != last and len(sections) > 1 and definition.section:
            text += f"\n\n# --- {definition.section} ---\n\n"
        is_block = re.search(r"^(@|class |def |async def )", definition.text, re.MULTILINE)
        has_comment = definition.text.startswith("#")
        text += "\n\n" if is_block else "\n" if has_comment else ""
        text += definition.text + ("\n\n\n" if is_block else "\n")
        last = section
    return re.sub(r"\n{4,}", "\n\n\n", text).strip()


def _source_of(library: Library, item: str) -> str:
    """The code of a helper, or of one method such as `Tracker._see`."""
    name, *path = item.split(".")
    text = library.owners[name].text
    node: Any = next(
        n for n in ast.parse(text).body if getattr(n, "name", None) == name or not path
    )
    if not path:
        return text
    for part in path:
        node = next(n for n in node.body if getattr(n, "name", None) == part)
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[start - 1 : node.end_lineno]))


def pack_sample(folder: Path) -> str:
    """A cell's code that unpacks the files of `folder` into data/comments, where they are looked
    for; what is there already stays."""
    files = {path.name: path.read_bytes().decode("utf-8") for path in sorted(folder.glob("*.csv"))}
    packed = base64.b64encode(lzma.compress(json.dumps(files).encode(), preset=9)).decode()
    text = "\n".join(textwrap.wrap(packed, 88))
    return f'''\
import base64
import json
import lzma
from pathlib import Path

PACKED = """
{text}
"""  # {len(files)} CSV files: {", ".join(files)}
sample = Path("data", "comments")
sample.mkdir(parents=True, exist_ok=True)
for file, content in json.loads(lzma.decompress(base64.b64decode(PACKED))).items():
    if not (sample / file).exists():
        (sample / file).write_bytes(content.encode())
        print(f"{{sample / file}}: {{len(content):,}} characters")'''
