"""Re-renders profile-1.json (a recorded run) into every format: run it after a wanted change, and read the diff.

To record anew: ``ggml-async profile MODEL -ncmoe half,all -n 4 -p 8 -r 3 -o json`` on a tiny model, with the paths in
it made relative.
"""

import json
from pathlib import Path

from ggml_async.report import FORMATS, render

HERE = Path(__file__).parent

if __name__ == "__main__":
    document = json.loads((HERE / "profile-1.json").read_text())
    for name in FORMATS:
        (HERE / f"profile-1.{name}").write_text(render(name, document))
