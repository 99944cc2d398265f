"""Run `medusa` commands in this process: a new one takes ten seconds to import torch on a slow machine."""

import io
import sys
from contextlib import redirect_stdout
from unittest.mock import patch

from medusa.cli import main


def medusa(*arguments: object) -> str:
    """What the command prints on stdout; it must succeed."""
    with patch.object(sys, "argv", ["medusa", *map(str, arguments)]), redirect_stdout(io.StringIO()) as output:
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"medusa {arguments} ended with {end.code}") from end
    return output.getvalue()
