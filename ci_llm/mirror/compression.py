"""The compression of blocks by zstd, where it saves enough; bytes that do not shrink are stored as they are."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import zstandard

Compression: TypeAlias = Literal["auto", "zstd", "none"]

#: A block is compressed to at most this share of its size, or not at all.
WORTHWHILE: Final[dict[Compression, float]] = {"auto": 0.95, "zstd": 1.0, "none": 0.0}


def compressed(data: bytes, compression: Compression) -> bytes | None:
    """`data` as one frame of zstd; None where that saves too little."""
    if compression == "none":
        return None
    frame = zstandard.ZstdCompressor().compress(data)
    return frame if len(frame) < WORTHWHILE[compression] * len(data) else None


def restored(frame: bytes, size: int) -> bytes:
    """The bytes of a frame. Raises ValueError: it is damaged, or does not hold `size` bytes."""
    try:
        if zstandard.frame_content_size(frame) != size:  # first: a frame may claim any size
            raise ValueError("the frame is of another size")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"the frame cannot be read: {error}") from error
