"""No reward for diversity: cross-entropy alone is learned, and the Jensen gap is measured for the log."""

from __future__ import annotations

from ci_llm.crowd.diversity import DiversityForm
from ci_llm.crowd.diversity.joint import term

form = DiversityForm(term, rewarded=False)
