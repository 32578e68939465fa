"""`python -m undertow` is the `undertow` command."""

import sys

from undertow.cli import main

sys.exit(main())
