"""The side channel: an error without a message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from ci_llm.distributed.process_group import peer_errors
from ci_llm.distributed.side_channel import SideChannel
from ci_llm.errors import PeerLost


@pytest.fixture
def channel() -> Iterator[SideChannel]:
    """A channel of one process, which communicates all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SideChannel()
    dist.destroy_process_group()


def test_an_error_without_a_message_is_a_lost_peer_too(channel: SideChannel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    with pytest.raises(PeerLost) as told, peer_errors():
        fail()
    assert told.value.where == "RuntimeError"
    monkeypatch.setattr(dist, "all_gather", fail)
    for _ in range(2):
        with pytest.raises(PeerLost) as told:
            channel.exchange(b"")
        assert told.value.where == "RuntimeError"
