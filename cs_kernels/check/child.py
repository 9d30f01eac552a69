"""Runs checks in a separate process: `python -m cs_kernels.check.child BACKEND DEVICE NAME...`.

The process writes a line of JSON when it is ready, and one after each check. It ends after the
first failure, because an error on a GPU makes all later GPU work in the process fail.
"""

import faulthandler
import json
import sys
import time

from cs_kernels.check.cases import CHECKS
from cs_kernels.ops.backends import use_backend


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def main(backend: str, device: str, *names: str) -> None:
    """Runs these checks until one fails."""
    faulthandler.enable()  # On the watchdog's SIGABRT, prints where a check hangs.
    _say(ready=True)
    for name in names:
        begin, failure, value = time.perf_counter(), None, None
        try:
            with use_backend(backend):
                value = CHECKS[name](device)
        except Exception as error:  # A wrong kernel can raise anything.
            failure = f"{type(error).__name__}: {error}"
        _say(value=value, failure=failure, seconds=time.perf_counter() - begin)
        if failure is not None:
            break


if __name__ == "__main__":
    main(*sys.argv[1:])
