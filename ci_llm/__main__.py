"""`python -m ci_llm` is `ci-llm`."""

import sys

from ci_llm.cli import main

sys.exit(main())
