"""Fails when the docs and the code disagree: options, environment variables, exit codes, decline reasons, fields."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from ggml_async import capture_fields, fields, native, verify_fields
from ggml_async.cli.main import main
from ggml_async.env import Env
from ggml_async.errors import ExitCode

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def _options(command: click.Command) -> set[str]:
    names: set[str] = set()
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            names.update(parameter.opts)
            names.update(parameter.secondary_opts)
    return names


def check_commands() -> list[str]:
    """Every command has a page; every option is on it; every long option on it exists."""
    problems = []
    assert isinstance(main, click.Group)
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        page = DOCS / f"{name}.md"
        if not page.is_file():
            problems.append(f"docs/{name}.md is missing")
            continue
        text = page.read_text(encoding="utf-8")
        options = _options(command)
        named = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", " ".join(re.findall(r"`([^`\n]*)`", text))))
        problems += [f"docs/{name}.md does not name {option}" for option in sorted(options - named)]
        problems += [
            f"docs/{name}.md names {option}, which ggml-async {name} does not have"
            for option in sorted(named - options)
            if option.startswith("--") and option != "--help"
        ]
    return problems


def check_environment() -> list[str]:
    """docs/environment.md lists exactly the variables of the table in env.py; no other page invents one."""
    listed = set(re.findall(r"^\| `(\w+)`", (DOCS / "environment.md").read_text(encoding="utf-8"), re.M))
    known = {variable.key for variable in Env}
    problems = [f"docs/environment.md lacks {name}" for name in sorted(known - listed)]
    problems += [f"docs/environment.md lists {name}, which nothing reads" for name in sorted(listed - known)]
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        found = set(re.findall(r"\bGGML_ASYNC_?[A-Z]*\b", page.read_text(encoding="utf-8")))
        constants = {name for name in found if name.startswith(("GGML_ASYNC_MODE", "GGML_ASYNC_ERR", "GGML_ASYNC_ABI"))}
        problems += [f"{page.name} names {name}, which nothing reads" for name in sorted(found - known - constants)]
    return problems


def check_exit_codes() -> list[str]:
    """The README's table of exit codes is the one in errors.py."""
    rows = {int(code) for code in re.findall(r"^\| (\d+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)}
    codes = {int(code) for code in ExitCode}
    return [] if rows == codes else [f"README.md lists exit codes {sorted(rows)}, errors.py has {sorted(codes)}"]


def check_declines() -> list[str]:
    """docs/contract.md explains exactly the reasons that the library knows."""
    text = (DOCS / "contract.md").read_text(encoding="utf-8")
    section = text.split("| reason (`declined_…`)")[1].split("\n2. ")[0]
    listed = set(re.findall(r"^\s*\| `(\w+)`", section, re.M))
    known = set(native.native().decline_names)
    return (
        []
        if listed == known
        else [f"docs/contract.md and the library differ in decline reasons: {sorted(listed ^ known)}"]
    )


#: Pages that are generated: the module whose `reference` makes each.
FIELD_PAGES = {"capture-fields.md": capture_fields, "profile-fields.md": fields, "verify-fields.md": verify_fields}


def check_fields() -> list[str]:
    """The pages of fields are what their tables generate."""
    problems = []
    for name, module in FIELD_PAGES.items():
        page = DOCS / name
        if not page.is_file() or page.read_text(encoding="utf-8") != module.reference():
            source = module.__name__.replace(".", "/")
            problems.append(f"docs/{name} is not what {source}.py generates: run `python tools/check_docs.py --write`")
    return problems


def run() -> int:
    """All checks; prints each problem. Returns the exit code."""
    if "--write" in sys.argv[1:]:
        for name, module in FIELD_PAGES.items():
            (DOCS / name).write_text(module.reference(), encoding="utf-8")
    problems = check_commands() + check_environment() + check_exit_codes() + check_declines() + check_fields()
    for problem in problems:
        print(f"check_docs: {problem}", file=sys.stderr)
    if not problems:
        print("check_docs: docs and code agree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(run())
