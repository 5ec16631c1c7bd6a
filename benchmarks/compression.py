"""Whether compressing checkpoints pays: zstd, and zstd over the bytes split by plane, for adapters, moments and all.

Split by plane, the first bytes of all numbers come first, then all second bytes, and so on: in numbers of one size the
exponents are alike. Bytes and CPU seconds of one thread, block by block as a mirror sends them.

python -m benchmarks.compression RUN/checkpoint_step_100
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import zstandard

from ci_llm.core.durable import read_chunks

NUMBER_BYTES = 4  # fp32: adapters and moments alike
PARTS = {"adapters": "agent*/*.safetensors", "moments": "optimizer*.safetensors", "all": "**/*"}


def by_plane(block: bytes) -> bytes:
    """The first bytes of all numbers, then the second ones, ..."""
    numbers = len(block) // NUMBER_BYTES
    planes = np.frombuffer(block, np.uint8, numbers * NUMBER_BYTES).reshape(numbers, NUMBER_BYTES).T
    return planes.tobytes() + block[numbers * NUMBER_BYTES :]


def zstd(block: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(block)


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstd,
    "planes": lambda block: zstd(by_plane(block)),
}


def blocks(folder: Path, pattern: str) -> Iterator[bytes]:
    for path in sorted(folder.glob(pattern)):
        if path.is_file():
            yield from read_chunks(path)


def measure(folder: Path, pattern: str) -> tuple[int, dict[str, tuple[int, float]]]:
    """Bytes of the files that match, and for each way bytes and CPU seconds; a block that grows is kept as it is."""
    data = list(blocks(folder, pattern))
    found = {}
    for name, way in WAYS.items():
        began = time.process_time()
        size = sum(min(len(way(block)), len(block)) for block in data)
        found[name] = (size, time.process_time() - began)
    return sum(map(len, data)), found


def table(folder: Path) -> str:
    lines = ["| part | MB | zstd | CPU s | split by plane | CPU s |", "|---|---|---|---|---|---|"]
    for part, pattern in PARTS.items():
        size, found = measure(folder, pattern)
        cells = [cell for now, seconds in found.values() for cell in (f"{now / size:.3f}", f"{seconds:.2f}")]
        lines.append(f"| {part} | {size / 1e6:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a checkpoint folder")
    print(table(parser.parse_args().checkpoint))


if __name__ == "__main__":
    main()
