"""Writes the tables of README.md and docs/, and the plots, from the records.

Times and memory are in bench/results/, training runs over several seeds in examples/results/uses/.

    python bench/page.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. With `--check`, nothing is
written, and the exit status is 1 if a page differs from the records. Only the plots need more than
the standard library.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from page_tables import contents

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "benchmarks.md", DOCS / "internals" / "gpu_kernels.md"]
BLOCK = re.compile(r"(<!-- table: (\S+) -->).*?(<!-- end -->)", re.DOTALL)


def main(*, check: bool) -> None:
    """Writes each page that differs from the records, or exits with its name."""
    for page in PAGES:
        written = page.read_text()
        text = BLOCK.sub(lambda m: f"{m[1]}\n\n{contents(m[2])}\n{m[3]}", written)
        if check and text != written:
            sys.exit(f"{page} differs from the records")
        page.write_text(text)
    if find_spec("matplotlib") and not check:
        from page_plots import draw_all

        draw_all()


if __name__ == "__main__":
    main(check=sys.argv[1:] == ["--check"])
