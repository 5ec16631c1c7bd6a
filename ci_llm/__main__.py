"""`python -m ci_llm` is `ci-llm`."""

import sys

from ci_llm.cli.main import main

sys.exit(main())
