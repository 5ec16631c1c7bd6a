"""What the tests of mirrors share: a run's folder with a mirror behind it, and a store that can be made to fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.typed_json import seal
from ci_llm.errors import MirrorUnreachable
from ci_llm.mirror import objects
from ci_llm.mirror.filling import fill
from ci_llm.mirror.head import Entry, Found, Head
from ci_llm.mirror.objects import LOCK
from ci_llm.mirror.sender import Mirror
from tests.checkpoints.conftest import said as said
from tests.mirror.mirrored import RUN_FILES, state
from tools.testbed.events import DEADLINE_S


class Node:
    """One machine with a disk of its own, whose run has a mirror."""

    def __init__(self, folder: Path, url: str, keep: int | None = 2, **options: Any) -> None:
        self.folder, self.url = folder, url
        self.manager = CheckpointManager(folder, max_to_keep=keep)
        self.mirror = Mirror(url, folder, keep=keep, files=RUN_FILES, **options)
        self.found = Found()

    @property
    def head(self) -> Head:
        found = self.mirror.reader.head()
        assert found is not None
        return found

    @property
    def line(self) -> list[str]:
        return [entry.name for entry in self.head.line]

    def begin(self) -> int | None:
        """Fill the disk and claim the mirror; the step from which the run resumes."""
        self.fill()
        self.claim()
        return self.manager.latest_step()

    def fill(self) -> None:
        self.found = fill(self.mirror.reader, self.manager, RUN_FILES)

    def claim(self) -> None:
        step = self.manager.latest_step()
        self.mirror.begin(-1 if step is None else step, self.manager.store.acquire_lease(), self.found)
        self.manager.saver.after_save = lambda _: self.mirror.wake()

    def save(self, *steps: int, flush: bool = True) -> None:
        for step in steps:
            assert self.manager.save(step, state(step))
            self.manager.wait_until_finished()
        if flush:
            assert self.mirror.flush(DEADLINE_S), self.mirror.state

    def close(self) -> None:
        self.mirror.stop()
        self.manager.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/mirror"


@pytest.fixture
def node(tmp_path: Path, url: str) -> Iterator[Callable[..., Node]]:
    """Makes nodes by the name of their disk, and closes them; with steps it begins and saves these."""
    made: list[Node] = []

    def make(disk: str, *steps: int, **options: Any) -> Node:
        made.append(Node(tmp_path / disk, **{"url": url, **options}))
        if steps:
            made[-1].begin()
            made[-1].save(*steps)
        return made[-1]

    yield make
    for one in made:
        one.close()


class Refusing:
    """A store that fails while `refuses` says so, and counts its requests."""

    def __init__(self, store: objects.Objects) -> None:
        self._store, self.url = store, store.url
        self.refuses: Callable[[str, str], bool] = lambda verb, key: False
        self.puts: list[str] = []

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._store, verb)

        def ask(key: Any, *rest: Any) -> Any:
            if self.refuses(verb, str(key)):
                raise MirrorUnreachable("503 Service Unavailable", where=self.url)
            if verb == "put":
                self.puts.append(key)
            return real(key, *rest)

        return ask


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> list[Refusing]:
    """Every store that a mirror opens, in order."""
    opened: list[Refusing] = []
    real = objects.open_objects

    def open_refusing(url: str, where: str = "mirror") -> Any:
        opened.append(Refusing(real(url, where)))
        return opened[-1]

    monkeypatch.setattr("ci_llm.mirror.sender.open_objects", open_refusing)
    monkeypatch.setattr("ci_llm.mirror.objects.FIRST_TRY_S", 0.01)
    return opened


def swaps_decide(store: objects.Objects) -> None:
    """Assert that a put_if_match of a store replaces only the version that was read; used for every kind of store."""
    with pytest.raises(objects.Missing):
        store.get_version("head")
    store.put_if_match("head", b"one", None)
    with pytest.raises(objects.Conflict):
        store.put_if_match("head", b"two", None)
    data, version = store.get_version("head")
    store.put_if_match("head", b"two", version)
    with pytest.raises(objects.Conflict):
        store.put_if_match("head", b"three", version)
    assert (data, store.get("head")) == (b"one", b"two")
    store.delete(["head", "none"])
    with pytest.raises(objects.Conflict):
        store.put_if_match("head", b"four", version)


def entry(node: Node, name: str) -> Entry:
    return node.mirror.reader.entry(node.head, name)


def stored(node: Node, key: str = "") -> Path:
    """Where a mirror that is a folder has an object."""
    return Path(node.url.removeprefix("file://")) / key


def keys_of(node: Node) -> set[str]:
    """The keys of all objects."""
    root = stored(node)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != LOCK}


def resealed(body: dict[str, Any]) -> bytes:
    """A forged head that has its own digest."""
    return seal({key: value for key, value in body.items() if key != "digest"}, hashlib.sha256)
