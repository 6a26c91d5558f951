"""`make mutants`: the plug-in is broken on purpose, in one way at a time, and something must notice.

Each mutant is an exact replacement in a copy of native/ (mutants.txt). Two things look for it: the native tests (on a
synthetic host) and the stress driver (random graphs in a real ggml on mock devices). One of them must fail; a crash or
a hang counts. A replacement that no longer applies is an error, and so is a mutant that nothing kills.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import driver

from ggml_async import fetch

#: Seconds for one run of the driver or one native test; longer is a hang.
TIMEOUT = 60
#: Where a device has no pinned memory of its own, its readbacks must be left to ggml.
UNPINNED = "declined_no_pinned_memory"
#: What the driver runs: mock options and arguments.
STRESS = [
    ("lazy=1,no_cpy_host=1", ["--graphs", "400", "--threads", "2"]),
    ("lazy=1", ["--graphs", "400", "--threads", "1"]),
    ("lazy=1,no_cpy_host=1,pinned_of_first=1", ["--graphs", "160", "--threads", "1", "--expect", UNPINNED]),
    ("lazy=1,no_cpy_host=1,1:pinned_falls_back=1", ["--graphs", "160", "--threads", "1", "--expect", UNPINNED]),
]


@dataclass
class Mutant:
    """A way to be wrong: (file in native/, text, replacement) each."""

    name: str
    changes: list[tuple[str, str, str]] = field(default_factory=list)


def read_mutants(path: Path) -> list[Mutant]:
    """Parses mutants.txt, whose head says how it is written."""
    mutants: list[Mutant] = []
    for part in re.split(r"^== ", path.read_text(), flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        mutant = Mutant(name)
        for change in re.split(r"^-- ", body, flags=re.MULTILINE)[1:]:
            file, _, texts = change.partition("\n")
            old, _, new = texts.partition("++\n")
            mutant.changes.append((file, old.removesuffix("\n"), new.removesuffix("\n")))
        mutants.append(mutant)
    return mutants


class Laboratory:
    """A copy of the sources in which mutants live and die."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / "source"  # mutated
        self.whole = folder / "whole"  # as it was when we began: others may be at work in the checkout
        self.built = folder / "build"
        self.runtime = fetch.ensure_runtime()
        shutil.rmtree(self.source, ignore_errors=True)
        for name in ("native", "tests/stress", "ggml_async"):
            shutil.copytree(
                driver.ROOT / name, self.source / name, dirs_exist_ok=True, symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__", "_native"),
                copy_function=shutil.copy,  # with the time of now: what was built of a mutant is not taken for this
            )  # fmt: skip
        shutil.copy(driver.ROOT / "CMakeLists.txt", self.source)
        shutil.rmtree(self.whole, ignore_errors=True)
        shutil.copytree(self.source / "native", self.whole)

    def build(self) -> None:
        """Raises subprocess.CalledProcessError where a mutant does not compile."""
        driver.build(self.built, source=self.source, targets=["all"])

    def apply(self, mutant: Mutant) -> None:
        """Writes the mutant into the copy.

        Raises:
            SystemExit: if a replacement does not apply exactly once.
        """
        for name in sorted({change[0] for change in mutant.changes}):
            text = (self.whole / name).read_text()
            for file, old, new in mutant.changes:
                if file == name:
                    if text.count(old) != 1:
                        sys.exit(
                            f"mutant {mutant.name!r}: its text is {text.count(old)} times in native/{name}, not once"
                        )
                    text = text.replace(old, new)
            (self.source / "native" / name).write_text(text)

    def undo(self, mutant: Mutant) -> None:
        """Puts the sources back."""
        for name in {change[0] for change in mutant.changes}:
            shutil.copy(self.whole / name, self.source / "native" / name)

    def killed_by_stress(self) -> str:
        """What went wrong, "" if nothing did."""
        for options, arguments in STRESS:
            try:
                outcome = driver.run(
                    self.built, self.runtime, *arguments, "--no-shrink", mock_options=options, timeout=TIMEOUT
                )
            except subprocess.TimeoutExpired:
                return "hangs"
            if outcome.code:
                text = outcome.log.strip().splitlines()
                return next(
                    (line for line in text if line.startswith("seed ")), text[-1] if text else f"exit {outcome.code}"
                )
        return ""

    def killed_by_native_tests(self) -> str:
        """The native tests that fail, "" if none does."""
        failed = []
        for test in sorted((self.built / "native" / "tests").glob("test_*")):
            if test.is_file() and test.stat().st_mode & 0o100:
                # A test runs each case in a child: one that hangs must not outlive it.
                with subprocess.Popen(
                    [test], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
                ) as process:
                    try:
                        code = process.wait(TIMEOUT)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        code = 1
                if code:
                    failed.append(test.name)
        return ", ".join(failed)


def main() -> int:
    """Runs them all, or those whose name contains an argument; returns the number that survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    parser.add_argument("--build", type=Path, default=driver.ROOT / "build" / "mutants", help="working folder")
    options = parser.parse_args()
    chosen = [
        m
        for m in read_mutants(Path(__file__).with_name("mutants.txt"))
        if not options.words or any(word in m.name for word in options.words)
    ]
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    laboratory = Laboratory(options.build)
    laboratory.build()
    if stress := laboratory.killed_by_stress():
        sys.exit(f"the plug-in itself fails: {stress}")
    if native := laboratory.killed_by_native_tests():
        sys.exit(f"the plug-in itself fails: {native}")
    survived = 0
    print("| mutant | random graphs on mock devices | native tests |\n|---|---|---|")
    for mutant in chosen:
        start = time.monotonic()
        laboratory.apply(mutant)
        laboratory.build()
        native, stress = laboratory.killed_by_native_tests(), laboratory.killed_by_stress()
        laboratory.undo(mutant)
        survived += not (native or stress)
        print(f"| {mutant.name} | {stress or '-'} | {native or '-'} |", flush=True)
        print(f"{mutant.name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(f"\n{len(chosen)} mutants, {len(chosen) - survived} killed")
    return survived


if __name__ == "__main__":
    sys.exit(main())
