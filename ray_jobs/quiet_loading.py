"""What libraries print while an engine loads, kept from the user unless it is needed."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Nothing reaches stderr until the end, also of what native code and subprocesses write; all of it does when an
    exception ends it. Log messages and progress of a whole process go there, so it is for a short time only."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            kept.seek(0)
            os.write(stderr, kept.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
