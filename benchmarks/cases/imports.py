"""What `import accelerate` costs on top of `import torch`, and whether it brings torch in by itself."""

from __future__ import annotations

import argparse
import sys
import time

from rounds import report


def milliseconds_over_torch() -> dict[str, list[float]]:
    import torch  # noqa: F401

    started = time.perf_counter()
    import accelerate  # noqa: F401

    package = time.perf_counter()
    from accelerate import Accelerator  # noqa: F401

    entry = time.perf_counter()
    return {"package": [1e3 * (package - started)], "accelerator": [1e3 * (entry - started)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", action="store_true", help="only tell whether torch was imported")
    options = parser.parse_args()
    if options.bare:
        import accelerate

        report({}, torch_imported="torch" in sys.modules, version=accelerate.__version__)
        return
    series = milliseconds_over_torch()
    report(series, unit="ms", version=sys.modules["accelerate"].__version__)


if __name__ == "__main__":
    main()
