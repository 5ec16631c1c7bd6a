"""What the presets named on the command line take, in GB, traced on a simulated GPU: `NAME ...`."""

from __future__ import annotations

import json
import sys

import torch

from tests.support.presets import gigabytes

print(f"\nfound {json.dumps({preset: gigabytes(preset, torch.device('cuda')) for preset in sys.argv[1:]})}")
