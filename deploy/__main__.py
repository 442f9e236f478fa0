"""`python -m deploy` is `tokenyard`."""

import sys

from deploy.cli import main

sys.exit(main())
