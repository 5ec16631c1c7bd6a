"""The side channel: an error without a message, and what a long message costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ci_llm.cluster.launch import read_launch
from ci_llm.distributed.processes import peer_errors, rendezvous_errors
from ci_llm.distributed.side_channel import FIRST_CAPACITY, SideChannel


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    """A channel of one process that communicates as one of several would."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SideChannel()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"),
    ],
    ids=lambda error: str(error)[:12],
)
def test_an_error_of_the_own_device_blames_no_peer(error: RuntimeError) -> None:
    """The supervisor cuts the batch after one, and starts again after the other."""
    launch = read_launch({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    for at in (rendezvous_errors(launch), peer_errors()):
        with pytest.raises(RuntimeError) as told, at:
            raise error
        assert told.value is error


def test_only_the_exchange_of_a_long_message_is_large(channel: SideChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    gather = dist.all_gather

    def watched(received: list[Tensor], sent: Tensor, **options: Any) -> Any:
        sizes.append(sent.numel())
        return gather(received, sent, **options)

    monkeypatch.setattr(dist, "all_gather", watched)
    short, long = b"short", bytes(range(256)) * 8000
    assert [channel.exchange(message) for message in (short, long, short)] == [[short], [long], [short]]
    assert sizes[0] == sizes[1] == sizes[3] < 2 * FIRST_CAPACITY
    assert len(long) <= sizes[2] <= 2 * len(long) + 8
    sizes.clear()
    medium = long[: 2 * FIRST_CAPACITY]
    assert [channel.exchange(message) for message in (medium, medium)] == [[medium], [medium]]
    assert len(sizes) == 3  # the second time, its size is known
