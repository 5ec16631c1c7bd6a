"""The needs of the first tokenisation of a data set: peak resident memory and rows per second, for growing data sets.

`python -m benchmarks.tokenization [--rows N ...] [--form F] [--folder D]`: question and answer as in the embedded task,
or the same rows as token ids (`--form tokens`, without the time of a tokenizer), from a JSON-lines file, on one thread.
Each size runs in a process of its own. The resident set counts the pages of mapped files, which the system takes back
when it needs them: so the memory that is the program's alone (anonymous) stands beside it.

`--chats TEMPLATE` takes a chat template by name or file: the CPU time of tokenising 2,000 chats of 12 turns, and 50 of
400 messages with calls of tools, over that of rendering and tokenising each of them once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

SIZES: Final = (10_000, 100_000, 1_000_000)
HELD_OUT: Final = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=SIZES, help="sizes of the data sets")
    parser.add_argument("--form", choices=["chat", "tokens"], default="chat", help="what a row is")
    parser.add_argument("--folder", type=Path, help="where data and tokens lie meanwhile; a temporary one by default")
    parser.add_argument("--chats", metavar="TEMPLATE", help="chats under this template, and nothing else")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return
    if options.chats is not None:
        for count, messages, with_tools in ((2000, 12, False), (50, 400, True)):
            once, ours = seconds_of_chats(options.chats, count, messages, with_tools=with_tools)
            print(f"{count} chats of {messages} messages: {ours:.2f} s / {once:.2f} s = {ours / once:.2f}", flush=True)
        return
    print("     rows   MB of data   MB of tokens   peak MB: imports   loading   tokenising   anonymous   rows/s")
    for rows in options.rows:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            data = write(Path(folder, "data.jsonl"), rows, as_tokens=options.form == "tokens")
            found = in_child(data)
            peaks = "   ".join(
                f"{found[name] / 1e6:9.0f}" for name in ("imports", "loading", "tokenising", "anonymous")
            )
            sizes = f"{data.stat().st_size / 1e6:10.1f}   {found['tokens_bytes'] / 1e6:12.1f}"
            print(f"{rows:9,d}   {sizes}   {peaks}   {rows / found['seconds']:9.0f}", flush=True)


def seconds_of_chats(template: str, count: int, messages: int, *, with_tools: bool) -> tuple[float, float]:
    """CPU seconds of rendering and tokenising each chat once, and of `tokenize`, which reads and writes them too."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    from ci_llm import embedded
    from ci_llm.data.encoder import use_chat_template
    from ci_llm.data.sources import recognised
    from ci_llm.data.tokens import tokenize

    tokenizer = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)
    use_chat_template(tokenizer, template)
    known = itertools.cycle(embedded.rows("train"))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chats = []
    for _ in range(count):
        turns = list[dict[str, Any]]()
        while len(turns) < messages:
            row = next(known)
            turns.append({"role": "user", "content": row["question"]})
            if with_tools:
                turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
                turns.append({"role": "tool", "name": "add", "content": row["answer"]})
            turns.append({"role": "assistant", "content": row["answer"]})
        chats.append(turns)
    start = time.process_time()
    for turns in chats:
        tokenizer.apply_chat_template(turns)
    once = time.process_time() - start
    rows = recognised(Dataset.from_list([{"messages": json.dumps(turns)} for turns in chats]), "chats")
    assert rows.fingerprint  # that the rows are read once for their fingerprint is no part of tokenising
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        tokenize(rows, tokenizer, max_seq_length=10**6, cache_folder=Path(folder))
        return once, time.process_time() - start


def write(path: Path, rows: int, *, as_tokens: bool) -> Path:
    """A file of so many different rows."""
    from transformers import AutoTokenizer

    from ci_llm import embedded

    tokenizer = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)
    known = embedded.rows("train")
    ids = tokenizer([f"{row['question']} {row['answer']}" for row in known])["input_ids"]
    with path.open("w") as file:
        for number, row, tokens in zip(range(rows), itertools.cycle(known), itertools.cycle(ids), strict=False):
            own = (
                {"input_ids": [3 + number % 90, *tokens]}
                if as_tokens
                else {**row, "question": f"{number}. {row['question']}"}
            )
            file.write(json.dumps(own) + "\n")
    return path


def in_child(data: Path) -> dict[str, Any]:
    """The result of `measure` in a new process."""
    command = [sys.executable, "-m", "benchmarks.tokenization", "--measure", str(data)]
    caches = {"HF_HOME": str(data.parent / "hub"), "HF_DATASETS_CACHE": str(data.parent / "cache")}
    environment = os.environ | caches | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def measure(data: Path) -> dict[str, Any]:
    """Tokenise the data set as a run does; bytes of the peak of the resident set after each part, and seconds."""
    from transformers import AutoTokenizer

    from ci_llm import embedded
    from ci_llm.config import Config
    from ci_llm.data.sources import load_rows
    from ci_llm.data.tokens import tokenize

    found: dict[str, Any] = {"imports": peak_bytes()}
    rows = load_rows(Config(dataset_name=str(data), val_set_size=HELD_OUT), "train")
    found["loading"] = peak_bytes()
    anonymous = Largest()
    tokenizer = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)
    start = time.perf_counter()
    with anonymous:
        tokens = tokenize(rows, tokenizer, max_seq_length=512, cache_folder=data.parent / "tokens")
    found |= {"seconds": time.perf_counter() - start, "tokens_bytes": tokens.path.stat().st_size}
    assert len(tokens) == len(rows)
    return found | {"tokenising": peak_bytes(), "anonymous": anonymous.value}


def peak_bytes() -> int:
    """The largest resident set of this process so far, as Linux counts it: mapped files included."""
    return _status("VmHWM")


class Largest(threading.Thread):
    """Watches the anonymous memory of this process while a `with` block runs; `value` is the largest, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.value, self._over = 0, threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while True:
            self.value = max(self.value, _status("RssAnon"))
            if self._over.wait(0.05):
                return


def _status(field: str) -> int:
    """A figure of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(size) * 1024


if __name__ == "__main__":
    main()
